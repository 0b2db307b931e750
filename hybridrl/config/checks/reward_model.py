"""Checks of the reward model: its head, sizes, and use of its scores; and that the policy is none.

Its input is the policy's token ids, in the packed micro-batches of the policy's update.
models/vocabulary.py compares the two vocabularies.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridrl.config.checks.sizes import length_problems, sequence_head_problems
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, estimator_of
from hybridrl.config.planner.model_shape import ModelShape, model_shape
from hybridrl.config.schema import RunConfig

REWARD_MODEL_PATH = "reward_model.model.path"
# Suffix of transformers' classes with a classification head.
ARCHITECTURE = "ForSequenceClassification"
# Default of transformers if config.json names no labels.
DEFAULT_LABELS = 2
NO_REWARD = "hybridrl.rewards.none.score"
OTHER_WAYS = (
    "Or score the text instead, by a reward function of your own (reward.function) or a server "
    "(reward=http)"
)


def reward_model_shape(path: str, read_model: Callable[[str], dict[str, Any]]) -> ModelShape:
    """Return the sizes of a reward model's backbone; `read_model` gives its config.json.

    Raises:
        ConfigError: the model cannot be read, or its head does not give a single score.
    """
    try:
        config = read_model(path)
        shape = model_shape(config)
    except ConfigError as error:
        raise ConfigError(*map(as_reward_model, error.problems)) from error
    if problem := _head_problem(path, config):
        raise ConfigError(problem)
    return shape


def policy_shape(path: str, read_model: Callable[[str], dict[str, Any]]) -> ModelShape:
    """Return the sizes of the policy; `read_model` gives its config.json.

    Raises:
        ConfigError: the model cannot be read, is not supported, or is a reward model.
    """
    config = read_model(path)
    for name in config.get("architectures") or []:
        if str(name).endswith(ARCHITECTURE):
            raise ConfigError(
                f"model.path = {path} is a {name}, expected a language model: vLLM does not sample "
                f"from a classifier.\n"
                f"Set model.path to the policy. A reward model is {REWARD_MODEL_PATH}."
            )
    return model_shape(config)


def named(path: str) -> str:
    """Return "key = value" of the checkpoint's path, for messages."""
    return f"{REWARD_MODEL_PATH} = {path}"


def as_reward_model(problem: str) -> str:
    """Return a problem of model.path as one of the reward model's path."""
    own = problem.replace("model.path", REWARD_MODEL_PATH)
    return own.replace(
        "model=embedded, the tiny model that comes with hybridrl", "reward_model=none"
    )


def _head_problem(path: str, config: Mapping[str, Any]) -> str | None:
    """Return the problem of a checkpoint without a head with one output."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(ARCHITECTURE) for name in names):
        return (
            f"{named(path)} is a {' or '.join(map(str, names)) or 'model without a class'}, "
            f"expected a class that ends in {ARCHITECTURE}: its score head gives the reward.\n"
            f"Set {REWARD_MODEL_PATH}=<such a checkpoint>. {OTHER_WAYS}."
        )
    labels, number = config.get("id2label"), config.get("num_labels", DEFAULT_LABELS)
    if isinstance(labels, Mapping):
        number = len(labels)
    if number == 1:
        return None
    return (
        f"{named(path)} has {number} labels, expected 1: the score of its only label is the "
        f"reward.\nSet {REWARD_MODEL_PATH}=<a checkpoint with num_labels = 1>. {OTHER_WAYS}."
    )


def reward_model_problems(config: RunConfig) -> Iterator[str]:
    """Find runs without any score, and settings that need scores before the reward model runs."""
    model = config.reward_model
    unrewarded = config.reward.function == NO_REWARD and not config.earns_rewards
    if unrewarded and (model is None or model.weight == 0):
        without = "no reward model" if model is None else "reward_model.weight = 0"
        yield (
            f"reward.function = {NO_REWARD} with {without}: every response scores 0, so nothing "
            f"could be learned.\n"
            f"Set reward_model=default {REWARD_MODEL_PATH}=<checkpoint>, or another reward."
        )
    if model is None:
        return
    rounds = config.algorithm.max_sampling_rounds
    if rounds > 1:
        yield (
            f"algorithm.max_sampling_rounds = {rounds} with a reward model, expected 1: resampling "
            f"uses the scores of reward.function while vLLM is awake; the reward model runs "
            f"later.\n"
            f"Set algorithm.max_sampling_rounds=1, or reward_model=none."
        )
    advantage = config.algorithm.advantage
    if estimator_of(advantage).needs_greedy_responses:
        others = ", ".join(
            name for name, e in BUILT_IN_ESTIMATORS.items() if not e.needs_greedy_responses
        )
        yield (
            f"algorithm.advantage = {advantage} with a reward model: it scores sampled "
            f"responses only, so their greedy baseline would lack its score.\n"
            f"Set algorithm.advantage to one of {others}, or reward_model=none."
        )


def reward_shape_problems(
    config: RunConfig, policy: ModelShape, reward: ModelShape
) -> Iterator[str]:
    """Check vocabulary, length and attention heads of the reward model against the policy's."""
    path = named(config.reward_model.model.path)
    if reward.vocab < policy.vocab:
        yield (
            f"{path} has {reward.vocab:,} token ids, expected at least the policy's "
            f"{policy.vocab:,}: its input is the policy's token ids.\n"
            f"Set {REWARD_MODEL_PATH}=<a model with the policy's vocabulary>. {OTHER_WAYS}."
        )
    yield from length_problems(config, reward, path)
    yield from sequence_head_problems(config, reward, path)
