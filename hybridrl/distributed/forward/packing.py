"""Packing of a micro-batch into one model input, or one rank's shard of it."""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.units import shared
from hybridrl.distributed.forward.sequence_parallel import SequenceGroup, shard_sizes
from hybridrl.distributed.forward.vision import SIZES, ImagePacker, PackedImages


class States(Enum):
    """Positions whose final hidden states a forward returns."""

    # The position before each response token, which predicts it.
    predicting = "predicting"
    # Each response's last token, which depends on all of it.
    last = "last"


@dataclass(frozen=True)
class SequenceShard:
    """Position of a rank's tokens in a packed input of N tokens that several ranks share.

    `num_responses` is the number of requested states on each rank.
    """

    group: SequenceGroup
    num_tokens: int
    num_responses: list[int]


class Kept(NamedTuple):
    """Tokens to which the distributions of R response tokens were cut, K in all.

    Attributes:
        rows: [K] int64, index of the response token, rising.
        ids: [K] int64, a token of its set.
        bounds: where each set begins, and the last one ends; R + 1 numbers.
    """

    rows: Tensor
    ids: Tensor
    bounds: list[int]


class Keys(NamedTuple):
    """Keys of packed sequences where equal first tokens of several are computed once.

    One sequence has them. Others begin with their first token that differs, and read its keys.

    Attributes:
        index: [K] int64, the packed token of each key of each sequence.
        bounds: [B + 1] int32, first key of each sequence; the last is K.
        max_length: most keys of a sequence.
    """

    index: Tensor
    bounds: Tensor
    max_length: int


@dataclass(frozen=True)
class Packed:
    """B packed sequences, each a prompt and its response, without padding.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64, counted from 0 in each sequence. With images of some models
            [4, 1, N], with positions in time, height and width behind these.
        cu_seq_lens: [B + 1] int32, start of each sequence; the last is N.
        max_length: length of the longest sequence.
        state_index: [R] int64, for each response token the position before it, whose hidden state
            predicts it. With States.last R = B, the position of each response's last token.
        response_ids: [R] int64, response tokens in the order of the batch, or `targets` in their
            place; with States.last the last ones.
        routed_experts: [1, N, L K], `RolloutBatch.routed_experts`; None: not used.
        kept: sets of the response tokens; None: all tokens.
        images: None on all ranks if no rank's responses have any.
        keys: None if no sequences share first tokens; else cu_seq_lens and max_length are those
            of the tokens that are computed.
        shard: None if one rank has the whole input. Otherwise cu_seq_lens and max_length are those
            of the whole input, all else is this rank's shard; state_index counts within it.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    max_length: int
    state_index: Tensor
    response_ids: Tensor
    routed_experts: Tensor | None = None
    kept: Kept | None = None
    images: PackedImages | None = None
    keys: Keys | None = None
    shard: SequenceShard | None = None


def pack(
    batch: RolloutBatch,
    device: torch.device,
    group: SequenceGroup | None = None,
    states: States = States.predicting,
    routed_experts: Ragged | None = None,
    images: ImagePacker | None = None,
    *,
    shares: bool = False,
) -> Packed:
    """Pack prompts and responses on `device`; with a group, this rank's shard of them.

    `routed_experts` are those of the batch, if the model uses them; `images` packs its images.
    If it `shares`, equal first tokens of sequences are computed once.

    Raises:
        ValueError: a prompt is empty, so the response's first token has no predicting state; or the
            model takes no images.
    """
    prompts, responses, lengths = batch.prompts, batch.responses, batch.num_tokens
    if bool((prompts.lengths == 0).any()):
        raise ValueError("a prompt without tokens predicts nothing")
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    position_ids = torch.arange(total) - (ends - lengths).repeat_interleave(lengths)
    is_response = position_ids >= prompts.lengths.repeat_interleave(lengths)
    input_ids = torch.empty(total, dtype=torch.int64)
    # Batches hold token ids as int32; a gather over the vocabulary requires int64.
    response_ids = responses.values.long()
    input_ids[is_response] = response_ids
    input_ids[~is_response] = prompts.values.long()
    if "targets" in batch.added:
        response_ids = batch.targets.values.long()
    state_index = is_response.nonzero().squeeze(1) - 1
    if states is States.last:
        state_index, response_ids = ends - 1, response_ids[responses.lengths.cumsum(0) - 1]
    starts = torch.cat([ends.new_zeros(1), ends])
    parts: Parts = (input_ids, position_ids, state_index, response_ids, starts)
    max_length, keys, shard = int(lengths.max()), None, None
    if shares:
        parts, keys = _shared(parts, device)
        max_length = int(parts[4].diff().max())
    routed = None if routed_experts is None else routed_experts.values.view(1, total, -1)
    if group is not None:
        parts, shard = _cut(parts, group)
        routed = None if routed is None else _cut_routed(routed, shard)
    moved = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    packed = Packed(
        input_ids=moved[0][None],
        position_ids=moved[1][None],
        cu_seq_lens=moved[4].to(torch.int32),
        max_length=max_length,
        state_index=moved[2],
        response_ids=moved[3],
        routed_experts=None if routed is None else to_device(routed, device),
        kept=_kept(batch, shard, device) if states is States.predicting else None,
        keys=keys,
        shard=shard,
    )
    return packed if batch.images is None else _with_images(packed, input_ids, batch, images)


def _shared(whole: "Parts", device: torch.device) -> tuple["Parts", Keys | None]:
    """Leave out first tokens that another sequence has; return where keys of each then are."""
    input_ids, position_ids, state_index, response_ids, starts = whole
    once = shared([row.numpy() for row in input_ids.split(starts.diff().tolist())])
    if not once:
        return whole, None
    places = torch.arange(len(input_ids))
    source, first = places.clone(), starts.tolist()
    for row, other, count in once:
        own, there = first[row], first[other]
        source[own : own + count] = source[there : there + count]
    computed = source == places
    index = (computed.cumsum(0) - 1)[source]
    ends = computed.cumsum(0)[starts[1:] - 1]
    parts = (
        input_ids[computed],
        position_ids[computed],
        index[state_index],
        response_ids,
        torch.cat([starts[:1], ends]),
    )
    longest = int(starts.diff().max())
    return parts, Keys(to_device(index, device), to_device(starts.int(), device), longest)


def _with_images(
    packed: Packed, input_ids: Tensor, batch: RolloutBatch, images: ImagePacker | None
) -> Packed:
    """Add the images of a batch with tokens `input_ids`, [N] on the CPU."""
    assert batch.images is not None
    if images is None or packed.shard is not None:
        raise ValueError("a model without a tower, and ranks that share sequences, take no images")
    rows, device, positions = batch.images.rows, packed.input_ids.device, packed.position_ids
    tensors, order, places = images.pack(input_ids, rows)
    # Transformers reads sizes in pixels one by one.
    moved = {k: x if k == SIZES else to_device(x, device) for k, x in tensors.items()}
    packed_images = PackedImages(moved, order, to_device(places, device))
    grid = images.positions(input_ids.split(batch.num_tokens.tolist()), rows)
    if grid is not None:
        positions = torch.cat([positions, to_device(grid, device)])[:, None]
    return replace(packed, position_ids=positions, images=packed_images)


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _cut(whole: Parts, group: SequenceGroup) -> tuple[Parts, SequenceShard]:
    """Cut this rank's part of input_ids, position_ids, state_index, response_ids, cu_seq_lens."""
    input_ids, position_ids, state_index, response_ids, starts = whole
    if len(input_ids) < group.size:
        # Layers need at least one token: the last ranks get sequences of one token that predict
        # nothing.
        missing = torch.zeros(group.size - len(input_ids), dtype=torch.int64)
        starts = torch.cat([starts, torch.arange(len(input_ids), group.size) + 1])
        input_ids = torch.cat([input_ids, missing])
        position_ids = torch.cat([position_ids, missing])
    sizes = shard_sizes(len(input_ids), group.size)
    bounds = torch.tensor([0, *accumulate(sizes)])
    # State indices rise, so those of a rank are adjacent.
    counts = torch.searchsorted(state_index, bounds).diff().tolist()
    own = group.rank
    parts = (
        input_ids.split(sizes)[own],
        position_ids.split(sizes)[own],
        state_index.split(counts)[own] - bounds[own],
        response_ids.split(counts)[own],
        starts,
    )
    return parts, SequenceShard(group, len(input_ids), counts)


def _cut_routed(whole: Tensor, shard: SequenceShard) -> Tensor:
    """Cut this rank's tokens; those that were added to have one for each rank have no experts."""
    added = whole.new_zeros(1, shard.num_tokens - whole.shape[1], whole.shape[2])
    sizes = shard_sizes(shard.num_tokens, shard.group.size)
    return torch.cat([whole, added], 1).split(sizes, 1)[shard.group.rank].contiguous()


def _kept(batch: RolloutBatch, shard: SequenceShard | None, device: torch.device) -> Kept | None:
    """Return the sets of this rank's response tokens, if they were recorded."""
    if batch.kept_ids is None or batch.kept_counts is None:
        return None
    assert batch.kept_counts.lengths.equal(batch.responses.lengths), "tokens without a set"
    counts, ids = batch.kept_counts.values.long(), batch.kept_ids.values
    if shard is not None:
        of_ranks, own = counts.split(shard.num_responses), shard.group.rank
        counts, ids = of_ranks[own], ids.split([int(part.sum()) for part in of_ranks])[own]
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    moved = to_device(torch.stack([rows, ids.long()]), device)
    return Kept(moved[0], moved[1], [0, *counts.cumsum(0).tolist()])


def sequence_index(bounds: Tensor, num_tokens: int) -> Tensor:
    """Return the sequence of each packed token, [N] int64, from bounds [B + 1] int32."""
    position = torch.arange(num_tokens, device=bounds.device)
    return torch.bucketize(position, bounds[1:], right=True)


class Padding(NamedTuple):
    """Places of N packed tokens in B rows of T tokens.

    Attributes:
        slot: [N] int64.
        sizes: B, T.
    """

    slot: Tensor
    sizes: tuple[int, int]

    @classmethod
    def of(cls, bounds: Tensor, longest: int, num_tokens: int) -> "Padding":
        """Compute the places from bounds [B + 1] int32."""
        sequence = sequence_index(bounds, num_tokens)
        position = torch.arange(num_tokens, device=bounds.device)
        slot = sequence * longest + position - bounds[sequence]
        return cls(slot, (bounds.shape[0] - 1, longest))

    def pad(self, x: Tensor) -> Tensor:
        """Return [B, T, ...] of [N, ...], zero on the right of each sequence."""
        rows = x.new_zeros(self.sizes[0] * self.sizes[1], *x.shape[1:])
        return rows.index_copy(0, self.slot, x).unflatten(0, self.sizes)

    def unpad(self, x: Tensor) -> Tensor:
        """Return [N, ...] of [B, T, ...]."""
        return x.flatten(0, 1).index_select(0, self.slot)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy CPU values to the device without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
