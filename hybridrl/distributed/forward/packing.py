"""Responses of a micro-batch as one packed model input, or one rank's piece of it."""

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from hybridrl.data.batch import RolloutBatch
from hybridrl.distributed.forward.sequence_parallel import SequenceGroup, piece_sizes


class States(Enum):
    """Whose final hidden states a forward is for."""

    # Of the position before each response token, which predicts it.
    predicting = "predicting"
    # Of each response's last token, which has seen all of it.
    last = "last"


@dataclass(frozen=True)
class Piece:
    """What a rank that shares a packed input knows beside its own tokens.

    Attributes:
        group: the ranks that share it.
        num_tokens: N, of the whole input.
        num_responses: wanted states that each rank has.
    """

    group: SequenceGroup
    num_tokens: int
    num_responses: list[int]


@dataclass(frozen=True)
class Packed:
    """B sequences, each a prompt and its response, one behind the other without padding.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, counted from 0 in each sequence.
        cu_seq_lens: [B + 1] int32, where each sequence begins; the last is N.
        max_length: the longest sequence.
        state_index: [R] int64, for each response token the position before it, whose hidden state
            predicts it. With States.last R = B, the position of each response's last token.
        response_ids: [R] int64, the response tokens, in the order of the batch; the last ones.
        piece: None if one rank has it all. Otherwise input_ids and position_ids are those of this
            rank's piece, state_index counts within it, and state_index and response_ids are of
            the response tokens whose state lies there; sequences are still those of the whole.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    max_length: int
    state_index: Tensor
    response_ids: Tensor
    piece: Piece | None = None


def pack(
    batch: RolloutBatch,
    device: torch.device,
    group: SequenceGroup | None = None,
    states: States = States.predicting,
) -> Packed:
    """The batch's prompts and responses, packed on `device`; of a group, this rank's piece.

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
    # Batches hold token ids as int32; a gather over the vocabulary wants them as int64.
    response_ids = responses.values.long()
    input_ids[is_response] = response_ids
    input_ids[~is_response] = prompts.values.long()
    state_index = is_response.nonzero().squeeze(1) - 1
    if states is States.last:
        state_index, response_ids = ends - 1, response_ids[responses.lengths.cumsum(0) - 1]
    starts = torch.cat([ends.new_zeros(1), ends])
    parts = (input_ids, position_ids, state_index, response_ids, starts)
    piece = None
    if group is not None:
        parts, piece = _cut(parts, group)
    moved = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    return Packed(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        cu_seq_lens=moved[4].to(torch.int32),
        max_length=int(lengths.max()),
        state_index=moved[2],
        response_ids=moved[3],
        piece=piece,
    )


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _cut(whole: Parts, group: SequenceGroup) -> tuple[Parts, Piece]:
    """This rank's part of input_ids, position_ids, state_index, response_ids, cu_seq_lens."""
    input_ids, position_ids, state_index, response_ids, starts = whole
    if len(input_ids) < group.size:
        # Layers cannot run on no token at all: the last ranks get sequences of one token that
        # predict nothing.
        missing = torch.zeros(group.size - len(input_ids), dtype=torch.int64)
        starts = torch.cat([starts, torch.arange(len(input_ids), group.size) + 1])
        input_ids = torch.cat([input_ids, missing])
        position_ids = torch.cat([position_ids, missing])
    sizes = piece_sizes(len(input_ids), group.size)
    bounds = torch.tensor([0, *accumulate(sizes)])
    # State indices rise, so each rank's stand together.
    counts = torch.searchsorted(state_index, bounds).diff().tolist()
    own = group.rank
    parts = (
        input_ids.split(sizes)[own],
        position_ids.split(sizes)[own],
        state_index.split(counts)[own] - bounds[own],
        response_ids.split(counts)[own],
        starts,
    )
    return parts, Piece(group, len(input_ids), counts)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """CPU values on the device, copied without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
