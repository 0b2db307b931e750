"""Seeds and stop tokens: what each sampled response depends on besides the weights."""

import json
from pathlib import Path
from typing import Any

from hybridrl.data.batch import PromptBatch
from hybridrl.data.seeds import derive_seed


def sample_seeds(run_seed: int, prompts: PromptBatch) -> list[int]:
    """One seed per response, those of each prompt together.

    A pure function of (run seed, step, prompt id, sample index, turn): it does not matter which
    engine answers a prompt or what else it answers, and ranks of one engine agree without talking.
    """
    first = [0] * len(prompts) if prompts.first_sample is None else prompts.first_sample.tolist()
    turn = ("turn", prompts.turn) if prompts.turn else ()
    return [
        derive_seed(run_seed, "sample", prompts.step, prompt_id, start + index, *turn)
        for prompt_id, start in zip(prompts.prompt_id.tolist(), first, strict=True)
        for index in range(prompts.responses_per_prompt)
    ]


def stop_token_ids(folder: Path) -> list[int]:
    """Ids that end a response, as a Hugging Face folder's files name them, in rising order.

    Reads `eos_token_id` of generation_config.json and config.json and the id of `eos_token` of
    tokenizer_config.json. Chat models often end a turn with a token that only one of them names.
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
    """The file's object; an absent file has no keys."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
