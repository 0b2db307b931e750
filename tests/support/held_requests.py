"""Requests that an engine holds over calls: with equal weights, and with others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Requests
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.vllm.engine import VLLMEngine
from tests.support.reshard_cases import LENGTHS, MAX_RESPONSE, prompts


def in_parts(engine: VLLMEngine) -> dict[str, Any]:
    """Responses at once, and in parts: of each its rows and what was sampled."""
    sampler, asked = Sampler(engine, engine._config), prompts(each=1)
    whole, parts = sampler.generate(asked, 0), []
    rows, places = [request.prompt for request in asked.requests], [0, 1, 2]
    while places:
        # A request that is held keeps its seed.
        other_seeds = held(rows, places, seed=10 * len(parts))
        if parts:  # a call that samples nothing keeps them
            sampler.generate(replace(other_seeds, token_budget=0.0), len(parts))
        part = sampler.generate(replace(other_seeds, token_budget=2.5), len(parts))
        parts.append((places, part))
        for place, row in zip(places, part.responses.rows(), strict=True):
            rows[place] = rows[place] + row.tolist()
        places = [place for place, more in zip(places, part.unfinished, strict=True) if more]
        engine.sync()
    return {"whole": whole, "parts": parts}


def over_a_change(engine: VLLMEngine, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Greedy responses that other weights continue, beside a new one; then the same anew."""
    sampler, rows = (
        Sampler(engine, engine._config),
        [one.prompt for one in prompts(each=1).requests],
    )
    first = sampler.generate(held(rows, [0, 1, 2], temperature=0.0, token_budget=2.5), 0)
    engine._model.load_weights(weights.items())
    engine.sync()
    new = rows[2]
    rows = [a + b.tolist() for a, b in zip(rows, first.responses.rows(), strict=True)]
    asked = held([*rows, new], [0, 1, 2, 3], temperature=0.0)
    mixed = sampler.generate(asked, 1)
    engine.sync()
    return {"mixed": mixed, "anew": sampler.generate(asked, 1), "open": engine._open}


def held(
    rows: Sequence[list[int]],
    places: Sequence[int],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    **call: Any,
) -> Requests:
    """A call that continues rows at some places; a fourth is a new response to the third prompt."""
    used = [len(rows[place]) - LENGTHS[min(place, 2)] for place in places]
    asked = prompts(
        temperature,
        rows=[rows[place] for place in places],
        max_tokens=[MAX_RESPONSE - count for count in used],
        each=1,
        names=places,
        holds=True,
        **call,
    )
    requests = [
        one._replace(seed=prompts(each=1).requests[min(place, 2)].seed + seed)
        for place, one in zip(places, asked.requests, strict=True)
    ]
    return replace(asked, requests=requests)


def joined(parts: Sequence[tuple[Sequence[int], RolloutBatch]], field: str) -> list[Tensor]:
    """Each row's tokens or log-probs of all parts."""
    rows: dict[int, list[Tensor]] = {}
    for places, part in parts:
        for place, row in zip(places, vars(part)[field].rows(), strict=True):
            rows.setdefault(place, []).append(row)
    return [torch.cat(rows[place]) for place in sorted(rows)]
