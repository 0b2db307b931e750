"""Tokens of models by id: those that end responses; equal ones of policy and frozen models."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.checks.frozen_models import REWARD_MODEL_PATH, of_key, path_problem
from hybridrl.config.command.input_errors import parse_json
from hybridrl.config.errors import ConfigError, Problem
from hybridrl.models.resolve import plain_folder, read_object

FILE = "tokenizer.json"


def stop_token_ids(folder: Path) -> list[int]:
    """Return the ids that end a response, from a Hugging Face folder, in rising order.

    Sources are `eos_token_id` in generation_config.json and config.json, and the tokenizer's
    `eos_token`. The end-of-turn token of chat models is often in only one of them.

    Raises:
        ConfigError: one of these files is damaged.
    """
    named: list[Any] = []
    for file in ("generation_config.json", "config.json"):
        ids = _read(folder / file).get("eos_token_id")
        named += ids if isinstance(ids, list) else [ids]
    config = _read(folder / "tokenizer_config.json")
    token = config.get("eos_token") or _read(folder / "special_tokens_map.json").get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    if text is not None:
        tokens = _tokens(folder, config)
        named += [number for number, token in tokens.items() if token == text]
    return sorted({number for number in named if type(number) is int and number >= 0})


def _tokens(folder: Path, config: dict[str, Any]) -> dict[int, str]:
    """Return a tokenizer's tokens by id; `config` is tokenizer_config.json."""
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    decoder = config.get("added_tokens_decoder") or {}
    added = {int(number): token["content"] for number, token in decoder.items()}
    return added | tokens_by_id(vocabulary, tokenizer)


def _read(file: Path) -> dict[str, Any]:
    """Return the file's JSON object; {} for an absent file."""
    return read_object(file) if file.is_file() else {}


def vocabulary_problems(
    policy_path: str, path: str, key: str = REWARD_MODEL_PATH
) -> Iterator[Problem]:
    """Yield a problem if a frozen model lacks tokens of the policy or has other ids for them.

    Further tokens of the model, such as one for padding, are no problem.
    """
    try:
        policy = read_vocabulary(policy_path)
        other = read_vocabulary(path, key)
    except ConfigError as error:
        yield from error.problems
        return
    differing = [index for index in sorted(policy) if other.get(index) != policy[index]]
    if differing:
        first = differing[0]
        there = f"is {other[first]!r}" if first in other else "means nothing"
        why = (
            f"token {first}, {policy[first]!r}, {there} there ({len(differing):,} of "
            f"{len(policy):,} tokens differ)"
        )
        expected = f"the vocabulary of model.path = {policy_path}, whose token ids it reads"
        names = "a model with the policy's tokenizer"
        yield path_problem("other_vocabulary", key, path, expected, why, names)


def read_vocabulary(path: str, key: str = "model.path") -> dict[int, str]:
    """Return every token of a model's tokenizer.json by its id; `key` is that of the path."""
    try:
        file = plain_folder(path) / FILE
    except ConfigError as error:
        raise of_key(error, key) from error
    if not file.is_file():
        raise ConfigError(
            f"{key} = {path} has no {FILE}, by which vocabularies are compared.\n"
            f"Save its tokenizer in that form (transformers does), or copy the file "
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
