"""Responses of a micro-batch as one packed model input."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.data.batch import RolloutBatch


@dataclass(frozen=True)
class Packed:
    """B sequences, each a prompt and its response, one behind the other without padding.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, counted from 0 in each sequence.
        cu_seq_lens: [B + 1] int32, where each sequence begins; the last is N.
        max_length: the longest sequence.
        state_index: [R] int64, for each response token the position before it, whose hidden state
            predicts it.
        response_ids: [R] int64, the response tokens, in the order of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    max_length: int
    state_index: Tensor
    response_ids: Tensor


def pack(batch: RolloutBatch, device: torch.device) -> Packed:
    """The batch's prompts and responses, packed on `device`.

    Raises:
        ValueError: a prompt is empty, so nothing predicts its response's first token.
    """
    prompts, responses, lengths = batch.prompts, batch.responses, batch.num_tokens
    if bool((prompts.lengths == 0).any()):
        raise ValueError("a prompt without tokens predicts nothing")
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    position_ids = torch.arange(total) - (ends - lengths).repeat_interleave(lengths)
    is_response = position_ids >= prompts.lengths.repeat_interleave(lengths)
    input_ids = torch.empty(total, dtype=torch.int64)
    input_ids[is_response] = responses.values
    input_ids[~is_response] = prompts.values
    parts = (
        input_ids,
        position_ids,
        is_response.nonzero().squeeze(1) - 1,
        responses.values,
        torch.cat([ends.new_zeros(1), ends]),
    )
    moved = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    return Packed(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        cu_seq_lens=moved[4].to(torch.int32),
        max_length=int(lengths.max()),
        state_index=moved[2],
        response_ids=moved[3],
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """CPU values on the device, copied without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
