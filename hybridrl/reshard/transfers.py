"""Transfers between ranks: what others need of each shard, in chunks that fit into buckets."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridrl.distributed.regions import Region, TracedCopy

# Transfers begin at multiples of this many elements in staging memory, so that 16-byte accesses
# stay possible whatever the sizes before them.
ALIGNMENT = 16


class SourceLayout(NamedTuple):
    """Checkpoint tensor, cut along one dim over the ranks of a shard group; see `NamedShard`."""

    name: str
    shape: tuple[int, ...]
    num_shards: int
    dim: int = 0

    def region(self, shard: int) -> Region:
        """Return the region that shard number `shard` holds; that of the first is the largest.

        Numbers from num_shards on, of ranks without weights, hold nothing.
        """
        size = self.shape[self.dim]
        longest = -(-size // self.num_shards)
        start = min(shard * longest, size)
        stop = min(start + longest, size)
        offset, shape = [0] * len(self.shape), list(self.shape)
        offset[self.dim], shape[self.dim] = start, stop - start
        return Region(tuple(offset), tuple(shape))


def intersect(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions of one tensor, or None."""
    start = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    if any(b <= a for a, b in zip(start, stop, strict=True)):
        return None
    return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def common_part(copy: TracedCopy, held: Region) -> TracedCopy | None:
    """Return the part of a copy whose source is in a region, or None."""
    region = intersect(held, copy.region)
    if region is None:
        return None
    offset = tuple(
        at + r - c for at, r, c in zip(copy.offset, region.offset, copy.region.offset, strict=True)
    )
    return TracedCopy(copy.source, region, copy.parameter, offset)


class Transfer(NamedTuple):
    """Copy that crosses ranks: the holder of its source packs it once for all receivers.

    The copy's whole region is in the sender's shard; `receivers` are the other ranks of the group
    that make it, in order.
    """

    copy: TracedCopy
    sender: int
    receivers: tuple[int, ...]


class Chunk(NamedTuple):
    """Transfers out of the same rows of every shard of one source.

    Attributes:
        load: [ranks] int64, elements of staging memory that each rank needs.
        slot: elements that each rank contributes to an all-gather; 0: transfers are sent.
        breadth: largest number of receivers of one transfer.
        transfers: those of the planning rank.
    """

    load: NDArray[np.int64]
    slot: int
    breadth: int
    transfers: list[Transfer]


# A copy out of one shard, and the ranks that make it.
_SharedCopy = tuple[TracedCopy, NDArray[np.int64]]


class Chunker:
    """Cuts sources into chunks, for one rank's part of the transfers.

    All shards go through their rows together, so that in a bucket every rank has something to
    send. Sources with equal shapes and copies, such as a model's layers, are cut once. A chunk is
    halved until no rank needs more than a quarter of `bucket_elements`.
    """

    def __init__(self, rank: int, num_ranks: int, bucket_elements: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._bucket_elements = bucket_elements
        self._known: dict[Any, tuple[list[Chunk], list[str]]] = {}

    def chunks(self, source: SourceLayout, copies: Sequence[tuple[int, TracedCopy]]) -> list[Chunk]:
        """Return the chunks of a source, in order, given all copies of it, each with its rank."""
        parameters = list(dict.fromkeys(copy.parameter for _, copy in copies))
        number = {name: index for index, name in enumerate(parameters)}
        geometry = tuple((r, c.region, number[c.parameter], c.offset) for r, c in copies)
        key = (source.shape, source.num_shards, source.dim, geometry)
        if key not in self._known:
            self._known[key] = (list(self._cut(source, copies)), parameters)
        chunks, names = self._known[key]
        renamed = dict(zip(names, parameters, strict=True))

        def of_source(transfer: Transfer) -> Transfer:
            _, region, parameter, offset = transfer.copy
            copy = TracedCopy(source.name, region, renamed[parameter], offset)
            return transfer._replace(copy=copy)

        return [chunk._replace(transfers=[*map(of_source, chunk.transfers)]) for chunk in chunks]

    def _cut(
        self, source: SourceLayout, copies: Sequence[tuple[int, TracedCopy]]
    ) -> Iterator[Chunk]:
        # Ranks with the same slice of an engine make the same copies.
        receivers: dict[TracedCopy, list[int]] = {}
        for receiver, copy in copies:
            receivers.setdefault(copy, []).append(receiver)
        shards = [source.region(rank) for rank in range(self._num_ranks)]
        needed = [
            [
                (part, np.array(ranks))
                for copy, ranks in receivers.items()
                if (part := common_part(copy, shard)) is not None
            ]
            for shard in shards
        ]
        parts = [(0, max(shard.shape[0] for shard in shards))]
        while parts:
            start, rows = parts.pop()
            chunk = self._chunk(shards, needed, start, rows)
            if rows > 1 and 4 * chunk.load.max() > self._bucket_elements:
                # The first half is popped first.
                parts += [(start + rows // 2, rows - rows // 2), (start, rows // 2)]
            elif chunk.load.any():
                yield chunk

    def _chunk(
        self, shards: Sequence[Region], needed: Sequence[list[_SharedCopy]], start: int, rows: int
    ) -> Chunk:
        """Return what rows [start, start + rows) of every shard send to other ranks.

        Transfers to all ranks are gathered: one operation instead of two for each other rank.
        Between two ranks a send is faster, and slots that few ranks fill are a waste.
        """
        sent, received = np.zeros((2, len(shards)), dtype=np.int64)
        breadths, transfers = {0}, []
        for sender, shard in enumerate(shards):
            height = min(rows, shard.shape[0] - start)
            if height <= 0:
                continue
            held = Region((shard.offset[0] + start, *shard.offset[1:]), (height, *shard.shape[1:]))
            for copy, ranks in needed[sender]:
                part = common_part(copy, held)
                receivers = ranks[ranks != sender]
                if part is None or not len(receivers):
                    continue
                size = aligned(part.region.numel)
                sent[sender] += size
                received[receivers] += size
                breadths.add(len(receivers))
                if self._rank == sender or (receivers == self._rank).any():
                    transfers.append(Transfer(part, sender, tuple(receivers.tolist())))
        breadth, slot = max(breadths), int(sent.max())
        to_all = breadth > 1 and breadths == {0, len(shards) - 1}
        if to_all and slot * len(shards) <= 2 * sent.sum():
            return Chunk(np.full_like(sent, slot * len(shards)), slot, breadth, transfers)
        return Chunk(sent + received, 0, breadth, transfers)


def aligned(size: int) -> int:
    """Round a number of elements up to the alignment of transfers."""
    return -(-size // ALIGNMENT) * ALIGNMENT
