"""Requests that an engine holds over calls: with equal weights, and with others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.rollout.requests import Generated
from hybridrl.rollout.vllm_engine import VLLMEngine
from tests.support.reshard_cases import MAX_RESPONSE, prompts


def in_parts(engine: VLLMEngine) -> dict[str, Any]:
    """Responses at once, and in parts: of each its rows and what was sampled."""
    request = replace(prompts(), responses_per_prompt=1, seeds=torch.tensor([1, 2, 3]))
    whole, rows, parts = engine.generate(request), [*request.prompts.rows()], []
    places = [0, 1, 2]
    while places:
        asked = naming(request, rows, places)
        # A request that is held keeps its seed.
        other_seeds = replace(asked, seeds=asked.seeds + 10 * len(parts))
        if parts:  # a call that samples nothing keeps them
            engine.generate(replace(other_seeds, token_budget=0.0))
        part = engine.generate(replace(other_seeds, token_budget=2.5))
        parts.append((places, part))
        for place, row in zip(places, part.responses.rows(), strict=True):
            rows[place] = torch.cat([rows[place], row])
        places = [place for place, more in zip(places, part.unfinished, strict=True) if more]
        engine.reset_prefix_cache(len(parts))
    return {"whole": whole, "parts": parts}


def over_a_change(engine: VLLMEngine, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Greedy responses that other weights continue, beside a new one; then the same anew."""
    request = replace(prompts(temperature=0.0), responses_per_prompt=1, seeds=torch.ones(3).long())
    rows, places = [*request.prompts.rows()], [0, 1, 2]
    first = engine.generate(replace(naming(request, rows, places), token_budget=2.5))
    engine._model.load_weights(weights.items())
    engine.reset_prefix_cache(1)
    new = rows[2]
    rows = [torch.cat(row) for row in zip(rows, first.responses.rows(), strict=True)]
    asked = naming(request, [*rows, new], [0, 1, 2, 3])
    mixed = engine.generate(asked)
    engine.reset_prefix_cache(1)
    return {"mixed": mixed, "anew": engine.generate(asked), "open": engine._requests.held}


def naming(request: PromptBatch, rows: Sequence[Tensor], places: Sequence[int]) -> PromptBatch:
    """A call that continues rows at some places; a fourth is a new response to the third prompt."""
    of_prompt = [min(place, 2) for place in places]
    used = torch.tensor([len(rows[p]) for p in places]) - request.prompts.lengths[of_prompt]
    assert request.seeds is not None
    return replace(
        request,
        prompts=Ragged.from_rows([rows[p] for p in places], torch.int64),
        prompt_id=request.prompt_id[of_prompt],
        max_tokens=MAX_RESPONSE - used,
        seeds=request.seeds[of_prompt],
        response_id=torch.tensor(places),
    )


def joined(parts: Sequence[tuple[Sequence[int], Generated]], field: str) -> list[Tensor]:
    """Each row's tokens or log-probs of all parts."""
    rows: dict[int, list[Tensor]] = {}
    for places, part in parts:
        for place, row in zip(places, vars(part)[field].rows(), strict=True):
            rows.setdefault(place, []).append(row)
    return [torch.cat(rows[place]) for place in sorted(rows)]
