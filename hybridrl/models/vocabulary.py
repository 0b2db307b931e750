"""Check that policy and reward model assign the same token ids."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.checks.reward_model import (
    OTHER_WAYS,
    REWARD_MODEL_PATH,
    as_reward_model,
    named,
)
from hybridrl.config.command.input_errors import parse_json
from hybridrl.config.errors import ConfigError
from hybridrl.models.resolve import plain_folder

FILE = "tokenizer.json"


def vocabulary_problems(policy_path: str, reward_path: str) -> Iterator[str]:
    """Yield a problem if the reward model lacks tokens of the policy or has other ids for them.

    Further tokens of the reward model, such as one for padding, are no problem.
    """
    try:
        policy = read_vocabulary(policy_path)
        reward = read_vocabulary(reward_path, REWARD_MODEL_PATH)
    except ConfigError as error:
        yield from error.problems
        return
    differing = [index for index in sorted(policy) if reward.get(index) != policy[index]]
    if differing:
        first = differing[0]
        there = f"is {reward[first]!r}" if first in reward else "means nothing"
        yield (
            f"{named(reward_path)} has another vocabulary than model.path = {policy_path}: token "
            f"{first}, {policy[first]!r}, {there} for the reward model ({len(differing):,} of "
            f"{len(policy):,} tokens differ). It reads the policy's token ids as they are.\n"
            f"Name a reward model with the policy's tokenizer. {OTHER_WAYS}."
        )


def read_vocabulary(path: str, key: str = "model.path") -> dict[int, str]:
    """Return every token of a model's tokenizer.json by its id; `key` is that of the path.

    Raises:
        ConfigError: the model or the file does not exist or cannot be read.
    """
    try:
        file = plain_folder(path) / FILE
    except ConfigError as error:
        raise ConfigError(*map(as_reward_model, error.problems)) from error
    if not file.is_file():
        raise ConfigError(
            f"{key} = {path} has no {FILE}, by which the vocabularies of policy and reward model "
            f"are compared.\nSave its tokenizer in that form (transformers does), or copy the file "
            f"from a model that has the same one."
        )
    try:
        content = parse_json(file.read_bytes())
        return tokens_by_id(content["model"]["vocab"], content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key} = {path}: {file} is no tokenizer's ({type(error).__name__}: {error}).\n"
            f"Copy that of the model."
        ) from error


def tokens_by_id(vocabulary: Any, tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a vocabulary and those that tokenizer.json adds to it, by id."""
    # Unigram: a list of [token, log-probability], the id is the place.
    is_list = isinstance(vocabulary, list)
    tokens = [token for token, _ in vocabulary] if is_list else vocabulary
    ids = range(len(vocabulary)) if is_list else vocabulary.values()
    added = tokenizer.get("added_tokens") or []
    return dict(zip(ids, tokens, strict=True)) | {one["id"]: one["content"] for one in added}
