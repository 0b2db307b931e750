"""Small batches for tests."""

import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged


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
