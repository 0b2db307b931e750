"""Checks of the reward model: its head, sizes, and use of its scores; and that the policy is none.

Its input is the policy's token ids, in the packed micro-batches of the policy's update.
models/vocabulary.py compares the two vocabularies.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config.checks.sizes import length_problems, sequence_head_problems
from hybridrl.config.errors import ConfigError, Problem, must_be
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, estimator_of
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RewardModelConfig, RunConfig

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


def reward_model_shape(
    model: RewardModelConfig | None, read_model: Callable[[str], dict[str, Any]]
) -> ModelShape | None:
    """Return the sizes of a reward model's backbone, if there is one.

    `read_model` gives its config.json.

    Raises:
        ConfigError: the model cannot be read, or its head does not give a single score.
    """
    if model is None:
        return None
    path = model.model.path
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
            why = f"vLLM does not sample from a {name}"
            remedy = f"Set model.path to the policy. A reward model is {REWARD_MODEL_PATH}"
            expected = "a language model"
            raise ConfigError(Problem("classifier", "model.path", path, expected, why, remedy))
    return model_shape(config)


def as_reward_model(problem: Problem) -> Problem:
    """Return a problem of model.path as one of the reward model's path."""
    texts = {name: text for name, text in vars(problem).items() if isinstance(text, str)}
    embedded = "model=embedded, the tiny model that comes with hybridrl"
    for name, text in texts.items():
        own = text.replace("model.path", REWARD_MODEL_PATH)
        texts[name] = own.replace(embedded, "reward_model=none")
    return replace(problem, **texts)


def path_problem(id_: str, path: str, expected: str, why: str, model: str) -> Problem:
    """Return the problem of the reward model's path, whose remedy is another `model`."""
    remedy = f"Set {REWARD_MODEL_PATH}=<{model}>. {OTHER_WAYS}"
    return Problem(id_, REWARD_MODEL_PATH, path, expected, why, remedy)


def _head_problem(path: str, config: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a checkpoint without a head with one output."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(ARCHITECTURE) for name in names):
        expected = f"a class that ends in {ARCHITECTURE}, whose score head gives the reward"
        why = f"it is a {' or '.join(map(str, names)) or 'model without a class'}"
        return path_problem("reward_head", path, expected, why, "such a checkpoint")
    labels, number = config.get("id2label"), config.get("num_labels", DEFAULT_LABELS)
    if isinstance(labels, Mapping):
        number = len(labels)
    if number == 1:
        return None
    expected, why = "1 label, whose score is the reward", f"it has {number} labels"
    return path_problem("reward_labels", path, expected, why, "a checkpoint with num_labels = 1")


def reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Find runs without any score, and settings that need scores before the reward model runs."""
    model = config.reward_model
    unrewarded = config.reward.function == NO_REWARD and not config.earns_rewards
    if unrewarded and (model is None or model.weight == 0):
        without = "no reward model" if model is None else "reward_model.weight = 0"
        why = f"with {without} every response scores 0, so nothing could be learned"
        remedy = f"Set reward_model=default {REWARD_MODEL_PATH}=<checkpoint>, or another reward"
        yield Problem("no_reward", "reward.function", NO_REWARD, "another", why, remedy)
    if model is None:
        return
    rounds, more = config.algorithm.max_sampling_rounds, ", or reward_model=none"
    if rounds > 1:
        why = (
            "resampling uses the scores of reward.function while vLLM is awake; the reward model "
            "runs later"
        )
        yield must_be("late_scores", "algorithm.max_sampling_rounds", rounds, 1, why, more)
    advantage, key = config.algorithm.advantage, "algorithm.advantage"
    if estimator_of(advantage).needs_greedy_responses:
        others = [name for name, e in BUILT_IN_ESTIMATORS.items() if not e.needs_greedy_responses]
        why = "the reward model does not score the greedy responses of its baseline"
        remedy = f"Set {key} to one of {', '.join(others)}{more}"
        yield Problem("unscored_baseline", key, advantage, "another", why, remedy)


def reward_shape_problems(
    config: RunConfig, policy: ModelShape, reward: ModelShape
) -> Iterator[Problem]:
    """Check vocabulary, length and attention heads of the reward model against the policy's."""
    assert config.reward_model is not None
    path = config.reward_model.model.path
    if reward.vocab < policy.vocab:
        expected = f"at least the policy's {policy.vocab:,} token ids, which are its input"
        why, model = f"it has {reward.vocab:,}", "a model with the policy's vocabulary"
        yield path_problem("reward_vocabulary", path, expected, why, model)
    owner = f"{REWARD_MODEL_PATH} = {path}"
    yield from length_problems(config, reward, owner)
    yield from sequence_head_problems(config, reward, owner)
