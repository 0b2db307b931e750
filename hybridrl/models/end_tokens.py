"""End tokens of a model, which end its responses."""

from pathlib import Path
from typing import Any

from hybridrl.config.command.input_errors import parse_json
from hybridrl.config.errors import ConfigError


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
        named.append(_ids(folder, config).get(text))
    return sorted({number for number in named if type(number) is int and number >= 0})


def _ids(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens; `config` is tokenizer_config.json."""
    tokenizer = _read(folder / "tokenizer.json")
    vocab = (tokenizer.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    if isinstance(vocab, list):  # Unigram's, with scores
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    decoder = config.get("added_tokens_decoder") or {}
    added = {token["content"]: int(number) for number, token in decoder.items()}
    added |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return {**vocab, **added}


def _read(file: Path) -> dict[str, Any]:
    """Return the file's JSON object; {} for an absent file."""
    if not file.is_file():
        return {}
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else f"is {error}"
        raise ConfigError(f"{file} {reason}") from error
    return found if isinstance(found, dict) else {}
