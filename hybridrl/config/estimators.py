"""Registry of advantage estimators, the values of `algorithm.advantage`.

An estimator is a function of named tensors and settings (algorithms/advantages.py). Its parameters
decide whether a run has a critic, compares responses of a prompt, or adds greedy responses. The
registry holds paths, so that checks of a config do not import torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from hybridrl.config.annotations import Unusable
from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import signature_of
from hybridrl.config.user_code.files import ESTIMATOR
from hybridrl.config.user_code.importing import try_out

# Parameters that an estimator may have: tensors, and keys of the algorithm section.
TENSORS = ("rewards", "values", "response_mask", "loss_mask", "group_id", "baseline_rewards")
SETTINGS = ("gamma", "lam", "pass_k")
KEY = ESTIMATOR
# Loss of a reward model's scores (policy_losses.py).
REWARD_LOSS = "bradley_terry"
# Tries a user's estimator. A path, as it imports torch.
TRY_ESTIMATOR = "hybridrl.app.own_algorithms.try_estimator"
TRIAL = "its trial on a small batch, one group of which has equal rewards,"


class Estimator(NamedTuple):
    """An advantage estimator.

    Attributes:
        path: dotted.
        takes: names of its parameters, from TENSORS and SETTINGS.
        whitens: true if it whitens the advantages over the batch itself.
        compares_turns: true if it takes `shares`, too, and so compares turns of responses.
    """

    path: str
    takes: tuple[str, ...]
    whitens: bool = False
    compares_turns: bool = False

    @property
    def uses_critic(self) -> bool:
        """True if the critic's values are a parameter."""
        return "values" in self.takes

    @property
    def compares_groups(self) -> bool:
        """True if the group of each response is a parameter."""
        return "group_id" in self.takes

    @property
    def needs_greedy_responses(self) -> bool:
        """True if the reward of each prompt's greedy response is a parameter."""
        return "baseline_rewards" in self.takes


def trains_reward_model(config: RunConfig) -> bool:
    """Return whether the run trains a reward model, in the critic's place, and no policy."""
    return config.algorithm.loss.function == REWARD_LOSS


def trains_policy(config: RunConfig, step: int) -> bool:
    """Return true unless only the critic is trained in the step (trainer.critic_warmup_steps)."""
    if trains_reward_model(config):
        return False
    return step > (config.trainer.critic_warmup_steps if uses_critic(config) else 0)


_COMPARED = ("rewards", "response_mask", "group_id")
_FUNCTIONS = (
    Estimator("advantages.gae", ("rewards", "values", "response_mask", "gamma", "lam")),
    Estimator(
        "advantages.reinforce_plus_plus", ("rewards", "response_mask", "gamma"), whitens=True
    ),
    Estimator("advantages.remax", ("rewards", "response_mask", "baseline_rewards")),
    Estimator("group_advantages.grpo", _COMPARED, compares_turns=True),
    Estimator("group_advantages.dr_grpo", _COMPARED, compares_turns=True),
    Estimator("group_advantages.rloo", _COMPARED),
    Estimator("group_advantages.opo", _COMPARED),
    Estimator("group_advantages.reinforce_plus_plus_baseline", _COMPARED, True, True),
    Estimator("group_advantages.pass_at_k", (*_COMPARED, "pass_k")),
)
BUILT_IN_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {e.path.split(".")[1]: e._replace(path=f"hybridrl.algorithms.{e.path}") for e in _FUNCTIONS}
)
# Supervised fine-tuning on reference answers, which has no advantages.
SUPERVISED = Estimator("none", ())


def estimator_of(advantage: str) -> Estimator:
    """Return the estimator of `algorithm.advantage`: a built-in name, none or the path of own code.

    Raises:
        ConfigError: it does not exist, or has a parameter that the trainer cannot fill.
    """
    if advantage in BUILT_IN_ESTIMATORS:
        return BUILT_IN_ESTIMATORS[advantage]
    if advantage == SUPERVISED.path:
        return SUPERVISED
    parameters = signature_of(KEY, advantage, BUILT_IN_ESTIMATORS, "algorithm")
    known = [*TENSORS, *SETTINGS]
    unknown = [p.name for p in parameters if p.name not in known and p.default is p.empty]
    if unknown:
        why, remedy = f"it has unknown parameters {', '.join(unknown)}", "Use only "
        remedy += ", ".join(known)
        raise ConfigError(Problem("estimator_parameters", KEY, advantage, "", why, remedy))
    return Estimator(advantage, tuple(p.name for p in parameters if p.name in known))


def taking(setting: str) -> list[str]:
    """Return the built-in estimators with a setting as parameter."""
    return [name for name, estimator in BUILT_IN_ESTIMATORS.items() if setting in estimator.takes]


def uses_critic(config: RunConfig) -> bool:
    """Return whether the run trains a value function."""
    return estimator_of(config.algorithm.advantage).uses_critic or trains_reward_model(config)


def is_supervised(config: RunConfig) -> bool:
    """Return whether the run trains on reference answers instead of sampled responses."""
    return config.algorithm.advantage == SUPERVISED.path


def trains_on_answers(config: RunConfig) -> bool:
    """Return whether the run trains on reference answers, at least in some steps."""
    given = 0.0 if config.teacher is None else config.teacher.given_fraction
    return is_supervised(config) or given > 0


def estimator_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that the estimator exists, that its parameters are known, and what it returns."""
    advantage, each = config.algorithm.advantage, 1
    with suppress(Unusable):  # without a value there is another problem
        each = config.rollout.responses_per_prompt
    mistakes = try_out(KEY, advantage, TRIAL, TRY_ESTIMATOR, config.algorithm, each)
    yield from mistakes
    if not mistakes:
        estimator_of(advantage)


def group_problems(config: RunConfig) -> Iterator[Problem]:
    """Check that an estimator that compares responses to a prompt has enough of them."""
    advantage, each = config.algorithm.advantage, config.rollout.responses_per_prompt
    estimator, k = estimator_of(advantage), config.algorithm.pass_k
    of_group, teacher = "rollout.responses_per_prompt", config.teacher
    if teacher is not None and not teacher.reward_coef:
        return  # rewards teach nothing
    if estimator.compares_groups and each < 2:
        why = f"{KEY} = {advantage} compares the responses to a prompt; one alone has advantage 0"
        remedy = f"Set {of_group}=2 or more, or algorithm=ppo"
        yield Problem("group_size", of_group, each, "at least 2", why, remedy)
    elif estimator.compares_groups and "pass_k" in estimator.takes and k >= each:
        key, expected = "algorithm.pass_k", f"less than {of_group} = {each}"
        why = f"{KEY} = {advantage} compares sets of pass_k responses; one alone has advantage 0"
        remedy = f"Set {key}={each - 1} or less, or {of_group}={k + 1} or more"
        yield Problem("pass_k", key, k, expected, why, remedy)
