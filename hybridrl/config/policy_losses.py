"""Registry of policy losses, the values of `algorithm.loss.function`, and their settings.

A policy loss is a function of named flat tensors and keyword settings (algorithms/). The registry
holds paths, so that checks of a config do not import torch.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hybridrl.config.annotations import ANY, BETWEEN_0_AND_1, Range, above_zero, share
from hybridrl.config.choices import Targets
from hybridrl.config.errors import ABSENT, ConfigError, Problem
from hybridrl.config.estimators import REWARD_LOSS
from hybridrl.config.keys import did_you_mean
from hybridrl.config.schema import RunConfig
from hybridrl.config.sections import FunctionConfig
from hybridrl.config.user_code.classes import signature_of
from hybridrl.config.user_code.importing import try_out

# Tensors that a policy loss may have as parameters.
TENSORS = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "advantages",
    "response_mask",
    "sequence_id",
    "ref_log_probs",
    "preferred",
    "kl_baseline",
)
KEY = "algorithm.loss"
# Tries a user's loss. A path, as it imports torch.
TRY_LOSS = "hybridrl.app.own_algorithms.try_loss"
TRIAL = "its trial on a small batch"


class PolicyLoss(NamedTuple):
    """A policy loss per token.

    Attributes:
        path: dotted.
        tensors: names of its tensors.
        settings: keyword settings with their ranges; `ANY`: any number.
        selection: dotted path of the function that selects the step's tokens for it, if any.
        selection_settings: settings of `selection`, likewise.
    """

    path: str
    tensors: tuple[str, ...]
    settings: Mapping[str, Range]
    selection: str | None = None
    selection_settings: Mapping[str, Range] = MappingProxyType({})

    @property
    def is_against_rollout(self) -> bool:
        """True if the loss itself uses the probabilities of sampling."""
        return "rollout_log_probs" in self.tensors

    @property
    def targets(self) -> Targets:
        """Kind of the responses that a supervised run with this loss trains on, by its tensors."""
        if "preferred" not in self.tensors:
            return Targets.answers
        return Targets.labels if "kl_baseline" in self.tensors else Targets.pairs

    @property
    def all_settings(self) -> dict[str, Range]:
        """Keys of algorithm.loss.args."""
        return {**self.settings, **self.selection_settings}


_SHARE = share("it is a share of all tokens", low_open=True)
_CLIP = {
    "clip_low": share("ratios are clipped to 1 - clip_low", low_open=True),
    "clip_high": above_zero("ratios are clipped to 1 + clip_high"),
}
_TAU = above_zero("the gate is scaled by 4 / tau")
_BETA = above_zero("it is the weight of the KL against the reference")
_WEIGHT = above_zero("each kind of response counts")
_RATIO = Range("a ratio of 1 means no change", 1)
_BASE = ("log_probs", "old_log_probs", "advantages", "response_mask")
_SAMPLED = ("log_probs", "rollout_log_probs", "advantages", "response_mask")
_COMPARED = ("log_probs", "ref_log_probs", "response_mask", "sequence_id", "preferred")
_FUNCTIONS = (
    PolicyLoss("losses.nll", ("log_probs", "response_mask"), {}),
    PolicyLoss("policy_losses.ppo_clip", _BASE, _CLIP),
    PolicyLoss("policy_losses.dual_clip", _BASE, {**_CLIP, "max_ratio": _RATIO}),
    PolicyLoss("policy_losses.gspo", (*_BASE, "sequence_id"), _CLIP),
    PolicyLoss("policy_losses.cispo", _BASE, _CLIP),
    PolicyLoss("policy_losses.sapo", _BASE, {"tau_positive": _TAU, "tau_negative": _TAU}),
    PolicyLoss(
        "policy_losses.dppo_tv",
        _SAMPLED,
        {"max_divergence": BETWEEN_0_AND_1, "max_ratio": _RATIO},
    ),
    PolicyLoss(
        "policy_losses.dppo_kl",
        _SAMPLED,
        {"max_divergence": above_zero("a divergence is not negative"), "max_ratio": _RATIO},
    ),
    PolicyLoss(
        "covariance_losses.clip_cov",
        (*_BASE, "selected"),
        _CLIP,
        "hybridrl.algorithms.covariance_losses.some_in_band",
        {"fraction": _SHARE, "cov_low": ANY, "cov_high": ANY},
    ),
    PolicyLoss(
        "covariance_losses.kl_cov",
        (*_BASE, "selected"),
        {"coef": Range("a negative penalty drives the policy away", 0)},
        "hybridrl.algorithms.covariance_losses.largest",
        {"fraction": _SHARE},
    ),
    PolicyLoss(
        "preference_losses.dpo",
        _COMPARED,
        {
            "beta": _BETA,
            "label_smoothing": Range("it is the share of swapped pairs", 0, 0.5, high_open=True),
        },
    ),
    PolicyLoss(f"preference_losses.{REWARD_LOSS}", ("scores", "preferred"), {}),
    PolicyLoss("preference_losses.ipo", _COMPARED, {"beta": _BETA}),
    PolicyLoss(
        "preference_losses.kto",
        (*_COMPARED, "kl_baseline"),
        {"beta": _BETA, "desirable_weight": _WEIGHT, "undesirable_weight": _WEIGHT},
    ),
)
BUILT_IN_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {f.path.split(".")[1]: f._replace(path=f"hybridrl.algorithms.{f.path}") for f in _FUNCTIONS}
)


def policy_loss_of(function: str) -> PolicyLoss:
    """Return the policy loss of `algorithm.loss.function`: a built-in name or the path of own code.

    Raises:
        ConfigError: it does not exist, or has a parameter that the actor cannot fill.
    """
    if function in BUILT_IN_LOSSES:
        return BUILT_IN_LOSSES[function]
    key = f"{KEY}.function"
    parameters = signature_of(key, function, BUILT_IN_LOSSES, "algorithm/loss")
    settings = {p.name: ANY for p in parameters if p.kind is p.KEYWORD_ONLY}
    tensors = tuple(p.name for p in parameters if p.name not in settings)
    unknown = [name for name in tensors if name not in TENSORS]
    if unknown:
        why = f"it has unknown parameters {', '.join(unknown)}"
        remedy = f"Use only {', '.join(TENSORS)}, and keyword-only settings"
        raise ConfigError(Problem("loss_parameters", key, function, "", why, remedy))
    return PolicyLoss(function, tensors, settings)


def uses_reference(config: RunConfig) -> bool:
    """Return whether the run computes log-probs of the frozen reference."""
    loss = policy_loss_of(config.algorithm.loss.function)
    return config.algorithm.kl.coef != 0 or "ref_log_probs" in loss.tensors


def targets_of(config: RunConfig) -> Targets:
    """Return what the run trains on, if it is supervised."""
    return policy_loss_of(config.algorithm.loss.function).targets


def responses_per_target(config: RunConfig) -> int:
    """Return the responses of an episode in the update: 2 of a pair."""
    return 2 if targets_of(config) is Targets.pairs else 1


def loss_problems(run: RunConfig) -> Iterator[Problem]:
    """Check the policy loss, its settings and what it returns."""
    config = run.algorithm.loss
    if mistakes := try_out(f"{KEY}.function", config.function, TRIAL, TRY_LOSS, run.algorithm):
        yield from mistakes
        return
    known, owner = policy_loss_of(config.function).all_settings, f"{KEY}.function = "
    owner += config.function
    for name in config.args.keys() - known.keys():
        key, why = f"{KEY}.args.{name}", f"it is no setting of {owner}"
        remedy = did_you_mean(key, [f"{KEY}.args.{k}" for k in known])
        remedy += "\nRemove it, or set algorithm/loss=<name> for a built-in loss with its settings"
        expected, value = ", ".join(known) or "none", config.args[name]
        yield Problem("loss_setting", key, value, expected, why, remedy)
    for name in known.keys() - config.args.keys():
        key, remedy = f"{KEY}.args.{name}", "or algorithm/loss=<name> for all settings"
        remedy = f"Set +{key}=<a value>, {remedy}"
        yield Problem("missing", key, ABSENT, "a value", f"{owner} needs it", remedy)
    yield from _value_problems(config, known)


def _value_problems(config: FunctionConfig, known: Mapping[str, Range]) -> Iterator[Problem]:
    """Check the ranges of a built-in loss's settings; a user's function checks its own."""
    if config.function not in BUILT_IN_LOSSES:
        return
    args = {name: value for name, value in config.args.items() if name in known}
    wrong = {
        name: value
        for name, value in args.items()
        if type(value) not in (int, float) or not known[name].contains(value)
    }
    for name, value in wrong.items():
        limits = f"a number, {known[name]}"
        yield Problem("range", f"{KEY}.args.{name}", value, limits, known[name].why)
    if wrong or known.keys() - args.keys():
        return
    if config.function == "dual_clip" and args["max_ratio"] <= 1 + args["clip_high"]:
        key, expected = f"{KEY}.args.max_ratio", f"above 1 + clip_high = {1 + args['clip_high']:g}"
        why = "a smaller bound would act on unclipped ratios"
        yield Problem("dual_clip", key, args["max_ratio"], expected, why, "Raise it")
    if config.function == "clip_cov" and args["cov_low"] >= args["cov_high"]:
        key, expected = f"{KEY}.args.cov_low", f"below {KEY}.args.cov_high = {args['cov_high']}"
        why = "tokens between the two are selected"
        yield Problem("clip_cov", key, args["cov_low"], expected, why, "Raise cov_high")
