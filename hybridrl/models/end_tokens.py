"""End tokens of a model, which end its responses."""

from pathlib import Path
from typing import Any

from hybridrl.models.resolve import read_object
from hybridrl.models.vocabulary import tokens_by_id


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
