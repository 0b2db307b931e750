"""Small batches for tests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Request, Requests, SamplingParams
from hybridrl.data.seeds import sample_seed


def batch_of(lengths: list[int]) -> RolloutBatch:
    """Responses of these lengths, whose tokens name their response."""
    rows = [[index] * length for index, length in enumerate(lengths)]
    responses = Ragged.from_rows(rows, torch.int64)
    return RolloutBatch(
        prompts=Ragged.from_rows([[index] * 2 for index in range(len(lengths))], torch.int64),
        responses=responses,
        response_mask=responses.like(torch.ones_like(responses.values, dtype=torch.bool)),
        rollout_log_probs=responses.like(-responses.values.float()),
        group_id=torch.arange(len(lengths)),
        weight_version=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def batch_of_rows(prompts: list[list[int]], responses: list[list[int]]) -> RolloutBatch:
    """These responses to these prompts."""
    return replace(
        batch_of([len(row) for row in responses]),
        prompts=Ragged.from_rows(prompts, torch.int32),
        responses=Ragged.from_rows(responses, torch.int32),
    )


def requests_of(
    rows: Sequence[list[int]],
    params: SamplingParams,
    *,
    max_tokens: int | Sequence[int],
    each: int = 1,
    first_id: int = 0,
    step: int = 1,
    names: Sequence[int] | None = None,
    must_finish: Sequence[bool] | None = None,
    **call: Any,
) -> Requests:
    """Requests for `each` responses to prompts, whose ids count from `first_id`."""
    count = len(rows) * each
    limits = [max_tokens] * len(rows) if isinstance(max_tokens, int) else max_tokens
    requests = [
        Request(
            f"1-{k // each + first_id if names is None else names[k // each]}-{k % each}",
            rows[k // each],
            sample_seed(5, step, k // each + first_id, k % each),
            limits[k // each],
            params,
            must_finish=must_finish is not None and must_finish[k // each],
        )
        for k in range(count)
    ]
    ids = torch.arange(first_id, first_id + len(rows)).repeat_interleave(each)
    return Requests(requests, ids, each, **call)
