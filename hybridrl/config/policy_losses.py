"""The policy losses that `algorithm.loss.function` may name, what they take, and their settings.

A policy loss is a function of flat tensors and keyword settings that it takes by name
(algorithms/clipped_losses.py and its neighbours). The built-in ones are listed here, so that a
check of the config does not import torch.
"""

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hybridrl.config.algorithm_schema import LossConfig
from hybridrl.config.annotations import Range
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import did_you_mean
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.importing import check_import

# What the actor can give a policy loss.
TENSORS = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "advantages",
    "response_mask",
    "sequence_id",
)
KEY = "algorithm.loss"


class PolicyLoss(NamedTuple):
    """A function that gives the losses of tokens.

    Attributes:
        path: dotted.
        tensors: names of those it takes.
        settings: its keyword settings and what they may be; None: not known.
        selection: dotted path of the function that selects the step's tokens for it, if there is
            one; it takes the settings that the loss itself does not.
        selection_settings: these, likewise.
    """

    path: str
    tensors: tuple[str, ...]
    settings: Mapping[str, Range | None]
    selection: str | None = None
    selection_settings: Mapping[str, Range | None] = MappingProxyType({})

    @property
    def is_against_rollout(self) -> bool:
        """Whether it weighs by the probabilities with which tokens were sampled, by itself."""
        return "rollout_log_probs" in self.tensors

    @property
    def all_settings(self) -> dict[str, Range | None]:
        """Keys of algorithm.loss.args."""
        return {**self.settings, **self.selection_settings}


_SHARE = Range(0, high=1, low_open=True, why="it is a share of all tokens")
_CLIP = {
    "clip_low": Range(0, high=1, low_open=True, why="ratios are clipped to 1 - clip_low"),
    "clip_high": Range(0, low_open=True, why="ratios are clipped to 1 + clip_high"),
}
_RATIO = Range(1, why="the weight of a token that became no likelier is at most 1")
_BASE = ("log_probs", "old_log_probs", "advantages", "response_mask")
_SAMPLED = ("log_probs", "rollout_log_probs", "advantages", "response_mask")
_CLIPPED = "hybridrl.algorithms.clipped_losses"
_TRUST = "hybridrl.algorithms.trust_region_losses"
_COVARIANCE = "hybridrl.algorithms.covariance_losses"

BUILT_IN_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo_clip": PolicyLoss(f"{_CLIPPED}.ppo_clip", _BASE, _CLIP),
        "dual_clip": PolicyLoss(f"{_CLIPPED}.dual_clip", _BASE, {**_CLIP, "max_ratio": _RATIO}),
        "gspo": PolicyLoss(f"{_CLIPPED}.gspo", (*_BASE, "sequence_id"), _CLIP),
        "cispo": PolicyLoss(f"{_CLIPPED}.cispo", _BASE, _CLIP),
        "sapo": PolicyLoss(
            f"{_TRUST}.sapo",
            _BASE,
            {
                "tau_positive": Range(0, low_open=True, why="the gate is scaled by 4 over it"),
                "tau_negative": Range(0, low_open=True, why="the gate is scaled by 4 over it"),
            },
        ),
        "dppo_tv": PolicyLoss(
            f"{_TRUST}.dppo_tv",
            _SAMPLED,
            {
                "max_divergence": Range(
                    0, 1, low_open=True, high_open=True, why="probabilities differ by at most 1"
                ),
                "max_ratio": _RATIO,
            },
        ),
        "dppo_kl": PolicyLoss(
            f"{_TRUST}.dppo_kl",
            _SAMPLED,
            {
                "max_divergence": Range(0, low_open=True, why="a divergence is not negative"),
                "max_ratio": _RATIO,
            },
        ),
        "clip_cov": PolicyLoss(
            f"{_COVARIANCE}.clip_cov",
            (*_BASE, "selected"),
            _CLIP,
            f"{_COVARIANCE}.some_in_band",
            {"fraction": _SHARE, "cov_low": None, "cov_high": None},
        ),
        "kl_cov": PolicyLoss(
            f"{_COVARIANCE}.kl_cov",
            (*_BASE, "selected"),
            {"coef": Range(0, why="a negative one drives the policy away")},
            f"{_COVARIANCE}.largest",
            {"fraction": _SHARE},
        ),
    }
)


def policy_loss_of(function: str) -> PolicyLoss:
    """The policy loss that `algorithm.loss.function` names: a built-in one, or a dotted path.

    Raises:
        ConfigError: there is none, or it takes something the actor does not have.
    """
    if function in BUILT_IN_LOSSES:
        return BUILT_IN_LOSSES[function]
    key = f"{KEY}.function"
    if "." not in function:
        raise ConfigError(
            f"{key} = {function}, expected one of {', '.join(BUILT_IN_LOSSES)} or a dotted path "
            f"such as my_package.my_module.my_loss.\n"
            f"algorithm/loss=<name> sets it with its settings."
        )
    found = locate(key, function)
    if not inspect.isfunction(found):
        raise ConfigError(f"{key} = {function} is no function.")
    parameters = inspect.signature(found).parameters.values()
    settings = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    tensors = tuple(p.name for p in parameters if p.name not in settings)
    unknown = [name for name in tensors if name not in TENSORS]
    if unknown:
        raise ConfigError(
            f"{key} = {function} takes {', '.join(unknown)}, which the actor does not have; a loss "
            f"may take {', '.join(TENSORS)}, and settings by keyword."
        )
    return PolicyLoss(function, tensors, settings)


def loss_problems(config: LossConfig) -> Iterator[str]:
    """What is wrong with the settings of the policy loss."""
    try:
        check_import(f"{KEY}.function", config.function)
        loss = policy_loss_of(config.function)
    except ConfigError as error:
        yield from error.problems
        return
    known = loss.all_settings
    for name in config.args.keys() - known.keys():
        near = did_you_mean(f"{KEY}.args.{name}", [f"{KEY}.args.{k}" for k in known])
        yield (
            f"{KEY}.args.{name} is no setting of {KEY}.function = {config.function}, which has "
            f"{', '.join(known) or 'none'}. {near}\n"
            f"algorithm/loss={config.function} sets a built-in function with its settings."
        )
    for name in known.keys() - config.args.keys():
        yield (
            f"{KEY}.args.{name} is missing: {KEY}.function = {config.function} asks for it. "
            f"Set +{KEY}.args.{name}=<a value>, or algorithm/loss=<name>, which sets them all."
        )
    yield from _value_problems(config, known)


def _value_problems(config: LossConfig, known: Mapping[str, Range | None]) -> Iterator[str]:
    """Built-in functions' settings out of range; a user's function checks its own."""
    if config.function not in BUILT_IN_LOSSES:
        return
    args = {name: value for name, value in config.args.items() if name in known}
    broken = False
    for name, value in args.items():
        allowed = known[name] or Range(-float("inf"))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and allowed.contains(value)):
            broken = True
            why = f": {allowed.why}" if allowed.why else ""
            yield f"{KEY}.args.{name} = {value}, expected a number, {allowed}{why}."
    if broken or known.keys() - args.keys():
        return
    if config.function == "dual_clip" and args["max_ratio"] <= 1 + args["clip_high"]:
        yield (
            f"{KEY}.args.max_ratio = {args['max_ratio']}, expected above 1 + clip_high = "
            f"{1 + args['clip_high']:g}: below, it would bound what clipping lets pass."
        )
    if config.function == "clip_cov" and args["cov_low"] >= args["cov_high"]:
        yield (
            f"{KEY}.args.cov_low = {args['cov_low']}, expected below {KEY}.args.cov_high = "
            f"{args['cov_high']}: tokens are drawn from the band between."
        )
