"""What ranks send each other in a reshard: messages, and the buckets in which they move."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.distributed.regions import Region, TracedCopy
from hybridrl.reshard.layout import SourceLayout, intersect

# Messages begin at multiples of this many elements in staging memory, so that 16-byte accesses
# stay possible whatever the sizes before them.
ALIGNMENT = 16


class Taker(NamedTuple):
    """Who takes a message, and where it lies in a parameter there, in the message's shape."""

    receiver: int
    parameter: str
    offset: tuple[int, ...]


class Message(NamedTuple):
    """A region of a source tensor that its holder packs once for all who take it.

    `sender` and the takers' `receiver` number the ranks of the shard group.
    """

    source: str
    region: Region
    sender: int
    takers: tuple[Taker, ...]

    @property
    def numel(self) -> int:
        """Elements moved to each receiver."""
        return math.prod(self.region.shape)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that take it, in order, each once."""
        return tuple(sorted({taker.receiver for taker in self.takers}))


class Section(NamedTuple):
    """Messages of one sender to the same receivers in one bucket: one send to each of them."""

    sender: int
    receivers: tuple[int, ...]
    messages: tuple[Message, ...]

    @property
    def size(self) -> int:
        """Elements, with what aligns the messages."""
        return sum(_aligned(message.numel) for message in self.messages)

    def places(self, start: int) -> Iterator[tuple[int, Message]]:
        """Each message with its place in a section that begins at `start`."""
        for message in self.messages:
            yield start, message
            start += _aligned(message.numel)


@dataclass(frozen=True)
class Bucket:
    """One rank's part of the messages that move together.

    Attributes:
        sends: from this rank.
        receives: to this rank; those of one sender in the order in which it sends them.
    """

    sends: list[Section]
    receives: list[Section]

    @property
    def send_size(self) -> int:
        """Elements of staging memory that this rank's messages take; packed once each."""
        return sum(section.size for section in self.sends)

    @property
    def received(self) -> int:
        """Elements of weights that this rank receives."""
        return sum(m.numel for section in self.receives for m in section.messages)

    @property
    def receive_size(self) -> int:
        """Elements of staging memory for what this rank receives."""
        return sum(section.size for section in self.receives)


def common_part(copy: TracedCopy, held: Region) -> TracedCopy | None:
    """The part of a copy whose source lies in a region, or None."""
    region = intersect(held, copy.region)
    if region is None:
        return None
    offset = tuple(
        at + r - c for at, r, c in zip(copy.offset, region.offset, copy.region.offset, strict=True)
    )
    return TracedCopy(copy.source, region, copy.parameter, offset)


def windows(
    source: SourceLayout, takers: Sequence[tuple[int, TracedCopy]], bucket_elements: int
) -> Iterator[list[Message]]:
    """The messages of a source, a few rows of each shard at a time.

    All shards go through their rows together, so that in a bucket every rank has something to
    send. A window is halved until no rank needs more than a quarter of a bucket for it, which
    leaves little of the buckets unused.
    """
    if not takers:
        return
    shards = [source.region(shard) for shard in range(source.num_shards)]
    parts = [(0, max(shard.shape[0] for shard in shards))]
    while parts:
        start, rows = parts.pop()
        window = list(_messages(source, shards, takers, start, rows))
        if rows > 1 and 4 * max(_load(window, source.num_shards)) > bucket_elements:
            # The first half is popped first.
            parts += [(start + rows // 2, rows - rows // 2), (start, rows // 2)]
        elif window:
            yield window


def _messages(
    source: SourceLayout,
    shards: Sequence[Region],
    takers: Sequence[tuple[int, TracedCopy]],
    start: int,
    rows: int,
) -> Iterator[Message]:
    """What moves of rows [start, start + rows) of every shard to other ranks."""
    for sender, shard in enumerate(shards):
        height = min(rows, shard.shape[0] - start)
        if height <= 0:
            continue
        window = Region((shard.offset[0] + start, *shard.offset[1:]), (height, *shard.shape[1:]))
        by_region: dict[Region, list[Taker]] = {}
        for receiver, copy in takers:
            piece = common_part(copy, window) if receiver != sender else None
            if piece is not None:
                taker = Taker(receiver, piece.parameter, piece.offset)
                by_region.setdefault(piece.region, []).append(taker)
        for region, takes in by_region.items():
            yield Message(source.name, region, sender, tuple(takes))


def _load(messages: Sequence[Message], num_ranks: int) -> list[int]:
    """Elements of staging memory that each rank needs for these messages."""
    load = [0] * num_ranks
    for message in messages:
        for rank in (message.sender, *message.receivers):
            load[rank] += _aligned(message.numel)
    return load


def fill_buckets(windows: Sequence[list[Message]], bucket_elements: int) -> Iterator[list[Message]]:
    """Join consecutive windows as long as no rank needs more than a bucket."""
    ranks = 1 + max((max(m.sender, *m.receivers) for w in windows for m in w), default=0)
    current: list[Message] = []
    load = [0] * ranks
    for window in windows:
        added = _load(window, ranks)
        total = [a + b for a, b in zip(load, added, strict=True)]
        if current and max(total) > bucket_elements:
            yield current
            current, total = [], added
        current.extend(window)
        load = total
    if current:
        yield current


def bucket_of(messages: Sequence[Message], rank: int) -> Bucket:
    """A rank's part of a bucket, in sections."""
    sections: dict[tuple[int, tuple[int, ...]], list[Message]] = {}
    for message in messages:
        sections.setdefault((message.sender, message.receivers), []).append(message)
    ordered = [Section(*key, tuple(part)) for key, part in sorted(sections.items())]
    return Bucket(
        sends=[section for section in ordered if section.sender == rank],
        receives=[section for section in ordered if rank in section.receivers],
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
