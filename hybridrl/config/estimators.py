"""The advantage estimators that `algorithm.advantage` may name, and what each of them takes.

An estimator is a function of tensors and settings that it takes by name (algorithms/advantages.py).
Whether a run has a critic, compares the responses of a prompt, or answers each prompt greedily,
follows from these names. The built-in ones are listed here, so that a check of the config does not
import torch.
"""

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import locate

# What the trainer can give an estimator: tensors, and keys of the algorithm section.
TENSORS = ("rewards", "values", "response_mask", "loss_mask", "group_id", "baseline_rewards")
SETTINGS = ("gamma", "lam", "pass_k")


class Estimator(NamedTuple):
    """A function that estimates advantages.

    Attributes:
        path: dotted.
        takes: names of its parameters, out of TENSORS and SETTINGS.
        whitens: whether its own definition normalises the advantages over the batch.
    """

    path: str
    takes: tuple[str, ...]
    whitens: bool = False

    @property
    def uses_critic(self) -> bool:
        """Whether it takes the critic's values."""
        return "values" in self.takes

    @property
    def compares_groups(self) -> bool:
        """Whether it takes the prompt to which each response belongs."""
        return "group_id" in self.takes

    @property
    def needs_greedy_responses(self) -> bool:
        """Whether it takes the outcome of each prompt's greedy response."""
        return "baseline_rewards" in self.takes


_ALONE = "hybridrl.algorithms.advantages"
_GROUPS = "hybridrl.algorithms.group_advantages"
_COMPARED = ("rewards", "response_mask", "group_id")
BUILT_IN_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": Estimator(f"{_ALONE}.gae", ("rewards", "values", "response_mask", "gamma", "lam")),
        "reinforce_plus_plus": Estimator(
            f"{_ALONE}.reinforce_plus_plus", ("rewards", "response_mask", "gamma"), whitens=True
        ),
        "remax": Estimator(f"{_ALONE}.remax", ("rewards", "response_mask", "baseline_rewards")),
        "grpo": Estimator(f"{_GROUPS}.grpo", _COMPARED),
        "dr_grpo": Estimator(f"{_GROUPS}.dr_grpo", _COMPARED),
        "rloo": Estimator(f"{_GROUPS}.rloo", _COMPARED),
        "opo": Estimator(f"{_GROUPS}.opo", _COMPARED),
        "reinforce_plus_plus_baseline": Estimator(
            f"{_GROUPS}.reinforce_plus_plus_baseline", _COMPARED, whitens=True
        ),
        "pass_at_k": Estimator("hybridrl.algorithms.pass_at_k.pass_at_k", (*_COMPARED, "pass_k")),
    }
)


def estimator_of(advantage: str) -> Estimator:
    """The estimator that `algorithm.advantage` names: a built-in one, or a dotted path.

    Raises:
        ConfigError: there is none, or it takes something the trainer does not have.
    """
    if advantage in BUILT_IN_ESTIMATORS:
        return BUILT_IN_ESTIMATORS[advantage]
    if "." not in advantage:
        raise ConfigError(
            f"algorithm.advantage = {advantage}, expected one of {', '.join(BUILT_IN_ESTIMATORS)} "
            f"or a dotted path such as my_package.my_module.my_advantage."
        )
    function = locate("algorithm.advantage", advantage)
    if not inspect.isfunction(function):
        raise ConfigError(f"algorithm.advantage = {advantage} is no function.")
    parameters = inspect.signature(function).parameters.values()
    known = [*TENSORS, *SETTINGS]
    unknown = [p.name for p in parameters if p.name not in known and p.default is p.empty]
    if unknown:
        raise ConfigError(
            f"algorithm.advantage = {advantage} takes {', '.join(unknown)}, which the trainer does "
            f"not have; an estimator may take {', '.join(known)}."
        )
    return Estimator(advantage, tuple(p.name for p in parameters if p.name in known))


def taking(setting: str) -> list[str]:
    """The built-in estimators that take a setting."""
    return [name for name, found in BUILT_IN_ESTIMATORS.items() if setting in found.takes]


def uses_critic(config: RunConfig) -> bool:
    """Whether the run trains a value function."""
    return estimator_of(config.algorithm.advantage).uses_critic


def group_problems(config: RunConfig) -> Iterator[str]:
    """Whether an estimator that compares the responses to a prompt has enough of them."""
    advantage, each = config.algorithm.advantage, config.rollout.responses_per_prompt
    estimator, k = estimator_of(advantage), config.algorithm.pass_k
    if estimator.compares_groups and each < 2:
        yield (
            f"rollout.responses_per_prompt = {each}, but algorithm.advantage = {advantage} "
            f"compares the responses to a prompt with each other: alone, each has advantage 0.\n"
            f"Set rollout.responses_per_prompt=2 or more, or algorithm=ppo."
        )
    elif estimator.compares_groups and "pass_k" in estimator.takes and k >= each:
        yield (
            f"algorithm.pass_k = {k}, but rollout.responses_per_prompt = {each}: "
            f"algorithm.advantage = {advantage} compares sets of pass_k responses to a prompt, and "
            f"one set alone has advantage 0.\n"
            f"Set algorithm.pass_k={each - 1} or less, or rollout.responses_per_prompt={k + 1} or "
            f"more."
        )
