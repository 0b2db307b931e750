"""Buckets: chunks that move together, and where each rank keeps them in staging memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.reshard.transfers import Chunk, Transfer, aligned


@dataclass(frozen=True)
class Bucket:
    """One rank's part of the transfers that move together, laid out in staging memory.

    slots of an all-gather, one a rank | send groups of this rank | those of other ranks

    A SendGroup holds the transfers from one rank to the same receivers. It is one send to each.

    Attributes:
        slot: elements of a slot; 0 if nothing is gathered.
        sends, receives: the other rank, and the part of staging memory that is sent or received;
            those between two ranks in one order on both.
        packed, unpacked: each transfer to or from other ranks, and its start.
        size: elements of staging memory.
    """

    slot: int
    sends: list[tuple[int, slice]]
    receives: list[tuple[int, slice]]
    packed: list[tuple[int, Transfer]]
    unpacked: list[tuple[int, Transfer]]
    size: int

    @property
    def operations(self) -> int:
        """Number of sends, receives and all-gathers of this rank."""
        return len(self.sends) + len(self.receives) + (self.slot > 0)

    @property
    def received(self) -> int:
        """Elements of weights that this rank receives."""
        return sum(transfer.numel for _, transfer in self.unpacked)


def fill_buckets(chunks: Iterable[Chunk], bucket_elements: int) -> Iterator[list[Chunk]]:
    """Join consecutive chunks as long as no rank needs more than a bucket."""
    current: list[Chunk] = []
    load = np.zeros(1, dtype=np.int64)
    for chunk in chunks:
        total = load + chunk.load
        if current and total.max() > bucket_elements:
            yield current
            current, total = [], chunk.load
        current.append(chunk)
        load = total
    if current:
        yield current


def bucket_of(chunks: Sequence[Chunk], rank: int, num_ranks: int) -> Bucket:
    """Lay out a rank's part of a bucket."""
    slot = sum(chunk.slot for chunk in chunks)
    ends = [number * slot for number in range(num_ranks)]
    placed: list[tuple[int, Transfer]] = []
    send_groups: dict[tuple[bool, int, tuple[int, ...]], list[Transfer]] = {}
    for transfer, is_gathered in ((t, c.slot > 0) for c in chunks for t in c.transfers):
        if is_gathered:
            placed.append((ends[transfer.sender], transfer))
            ends[transfer.sender] += aligned(transfer.numel)
        else:
            key = (transfer.sender != rank, transfer.sender, transfer.receivers)
            send_groups.setdefault(key, []).append(transfer)
    sends: list[tuple[int, slice]] = []
    receives: list[tuple[int, slice]] = []
    end = num_ranks * slot
    for (_, sender, receivers), transfers in sorted(send_groups.items()):
        begin = end
        for transfer in transfers:
            placed.append((end, transfer))
            end += aligned(transfer.numel)
        if sender == rank:
            sends += [(receiver, slice(begin, end)) for receiver in receivers]
        else:
            receives.append((sender, slice(begin, end)))
    return Bucket(
        slot=slot,
        sends=sends,
        receives=receives,
        packed=[(start, transfer) for start, transfer in placed if transfer.sender == rank],
        unpacked=[(start, transfer) for start, transfer in placed if transfer.sender != rank],
        size=end,
    )
