"""Seeds and stop tokens of sampled responses."""

import json
from pathlib import Path
from typing import Any

from hybridrl.data.batch import PromptBatch
from hybridrl.data.seeds import derive_seed


def sample_seeds(run_seed: int, prompts: PromptBatch) -> list[int]:
    """Return one seed per response, those of one prompt together.

    A pure function of (run seed, step, prompt id, sample index, turn). Seeds do not depend on the
    engine or on other prompts, and ranks of one engine agree without communication.
    """
    first = [0] * len(prompts) if prompts.first_sample is None else prompts.first_sample.tolist()
    turn = ("turn", prompts.turn) if prompts.turn else ()
    return [
        derive_seed(run_seed, "sample", prompts.step, prompt_id, start + index, *turn)
        for prompt_id, start in zip(prompts.prompt_id.tolist(), first, strict=True)
        for index in range(prompts.responses_per_prompt)
    ]


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
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
