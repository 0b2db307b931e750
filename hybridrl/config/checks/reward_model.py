"""Whether a reward model can score what the policy writes, and whether its scores are used.

It reads the policy's token ids as they are, over the packed micro-batches of the policy's update.
Whether both mean the same by an id is compared in models/vocabulary.py.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybridrl.config.checks.sequences import deals_heads
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, estimator_of
from hybridrl.config.planner.model_shape import SUPPORTED, ModelShape, model_shape
from hybridrl.config.schema import RunConfig

REWARD_MODEL_PATH = "reward_model.model.path"
# The end of the names of transformers' classes with a head for labels.
ARCHITECTURE = "ForSequenceClassification"
# What transformers assumes where config.json names no labels.
DEFAULT_LABELS = 2
NO_REWARD = "hybridrl.rewards.none.score"
OTHER_WAYS = (
    "Score with a reward function of your own (reward.function) or a server (reward=http) instead, "
    "which read the text"
)


def reward_model_shape(path: str, read_model: Callable[[str], dict[str, Any]]) -> ModelShape:
    """The sizes of a reward model's backbone.

    Args:
        path: of the checkpoint.
        read_model: path -> its config.json; may raise ConfigError.

    Raises:
        ConfigError: there is none, or it gives no single score by a head that is known here.
    """
    try:
        config = read_model(path)
        shape = model_shape(config)
    except ConfigError as error:
        raise ConfigError(*map(as_reward_model, error.problems)) from error
    problems = list(_head_problems(path, config))
    if problems:
        raise ConfigError(*problems)
    return shape


def named(path: str) -> str:
    """The key that names the checkpoint, and its value."""
    return f"{REWARD_MODEL_PATH} = {path}"


def as_reward_model(problem: str) -> str:
    """A problem of model.path, told of the reward model's path."""
    own = problem.replace("model.path", REWARD_MODEL_PATH)
    return own.replace(
        "model=embedded, the tiny model that comes with hybridrl", "reward_model=none"
    )


def _head_problems(path: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Whether the checkpoint has a head that gives one number."""
    names = config.get("architectures") or []
    if not any(str(name).endswith(ARCHITECTURE) for name in names):
        kinds = ", ".join(f"{kind.capitalize()}{ARCHITECTURE}" for kind in SUPPORTED)
        yield (
            f"{named(path)} is a {' or '.join(map(str, names)) or 'model of no class'}, "
            f"expected one of {kinds}: a reward is what its score head says.\n"
            f"Name such a checkpoint. {OTHER_WAYS}."
        )
        return
    labels = config.get("id2label")
    number = (
        len(labels) if isinstance(labels, Mapping) else config.get("num_labels", DEFAULT_LABELS)
    )
    if number != 1:
        yield (
            f"{named(path)} has {number} labels, expected one: its score is the reward.\n"
            f"Name a checkpoint with num_labels = 1. {OTHER_WAYS}."
        )


def reward_model_problems(config: RunConfig) -> Iterator[str]:
    """Scores that come too late, and runs in which nothing is scored."""
    unrewarded = config.reward.function == NO_REWARD and config.environment is None
    if config.reward_model is None:
        if unrewarded:
            yield (
                f"reward.function = {NO_REWARD} scores every response 0 and there is no reward "
                f"model: nothing could be learned.\n"
                f"Set reward_model=default {REWARD_MODEL_PATH}=<checkpoint>, or another reward."
            )
        return
    if config.reward_model.weight == 0 and unrewarded:
        yield (
            f"reward_model.weight = 0 and reward.function = {NO_REWARD}: every response scores 0, "
            f"so nothing could be learned.\n"
            f"Set reward_model.weight=1, or take another reward."
        )
    rounds = config.algorithm.max_sampling_rounds
    if rounds > 1:
        yield (
            f"algorithm.max_sampling_rounds = {rounds} with a reward model: responses are sampled "
            f"again by what reward.function says while vLLM is awake; the reward model scores "
            f"them later.\n"
            f"Set algorithm.max_sampling_rounds=1, or reward_model=none."
        )
    advantage = config.algorithm.advantage
    if estimator_of(advantage).needs_greedy_responses:
        others = ", ".join(
            name for name, e in BUILT_IN_ESTIMATORS.items() if not e.needs_greedy_responses
        )
        yield (
            f"algorithm.advantage = {advantage} with a reward model: greedy responses are scored "
            f"by reward.function alone, so sampled ones would be compared with another reward.\n"
            f"Set algorithm.advantage to one of {others}, or reward_model=none."
        )


def reward_shape_problems(
    config: RunConfig, policy: ModelShape, reward: ModelShape
) -> Iterator[str]:
    """Whether the reward model can be computed where and on what the policy is."""
    path, rollout = config.reward_model.model.path, config.rollout
    if reward.vocab < policy.vocab:
        yield (
            f"{named(path)} knows {reward.vocab:,} token ids, expected at least the "
            f"policy's {policy.vocab:,}: it reads the ids that the policy samples.\n"
            f"Name a reward model with the policy's vocabulary. {OTHER_WAYS}."
        )
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if reward.max_positions is not None and longest > reward.max_positions:
        yield (
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens} + "
            f"rollout.max_response_tokens = {rollout.max_response_tokens} make {longest} tokens, "
            f"expected at most {reward.max_positions}, the longest sequence that {named(path)} "
            f"knows (max_position_embeddings).\n"
            f"Lower one of them, or name another reward model."
        )
    size = config.fsdp.ulysses_size
    if not deals_heads(size, reward):
        yield (
            f"fsdp.ulysses_size = {size} does not divide the {reward.heads} attention heads and "
            f"{reward.kv_heads} KV heads of {named(path)}: in attention ranks that share a "
            f"sequence have equally many heads of it.\n"
            f"Set fsdp.ulysses_size=1, or name another reward model."
        )
