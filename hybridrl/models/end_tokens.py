"""End tokens of a model, which end its responses."""

import json
from pathlib import Path
from typing import Any


def stop_token_ids(folder: Path) -> list[int]:
    """Return the ids that end a response, from a Hugging Face folder, in rising order.

    Sources are `eos_token_id` in generation_config.json and config.json, and `eos_token` in
    tokenizer_config.json. The end-of-turn token of chat models is often in only one of them.
    """
    ids: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        named = _read(folder / file).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token["content"]
    if token is not None:
        tokenizer = _read(folder / "tokenizer.json")
        ids.update(t["id"] for t in tokenizer.get("added_tokens", []) if t["content"] == token)
    return sorted(ids)


def _read(file: Path) -> dict[str, Any]:
    """Return the file's JSON object; {} for an absent file."""
    return json.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}
