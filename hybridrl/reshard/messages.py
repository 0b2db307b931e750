"""What ranks send each other in a reshard: messages, and the buckets in which they move."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridrl.distributed.regions import Region, TracedCopy
from hybridrl.reshard.layout import SourceLayout, intersect

# Messages begin at multiples of this many elements in staging memory, so that 16-byte accesses
# stay possible whatever the sizes before them.
ALIGNMENT = 16


class Takers(NamedTuple):
    """Who takes a message, in order, and where it lies in a parameter there, in its shape."""

    receivers: tuple[int, ...]
    parameter: str
    offset: tuple[int, ...]


class Message(NamedTuple):
    """A region of a source tensor that its holder packs once for all who take it.

    `sender` and the takers' `receivers` number the ranks of the shard group.
    """

    source: str
    region: Region
    sender: int
    takers: tuple[Takers, ...]

    @property
    def numel(self) -> int:
        """Elements moved to each receiver."""
        return math.prod(self.region.shape)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that take it, in order, each once."""
        if len(self.takers) == 1:
            return self.takers[0].receivers
        return tuple(sorted({rank for takers in self.takers for rank in takers.receivers}))


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


class Window(NamedTuple):
    """What moves of a few rows of every shard of one source.

    Attributes:
        load: [ranks] int64, elements of staging memory that each rank needs for it.
        messages: those that the rank which plans sends or receives.
    """

    load: NDArray[np.int64]
    messages: list[Message]


class _Wanted(NamedTuple):
    """A copy out of one shard, and the ranks that make it."""

    copy: TracedCopy
    receivers: NDArray[np.int64]


class Windows:
    """Cuts sources into windows, for one rank's part of the messages.

    All shards go through their rows together, so that in a bucket every rank has something to
    send. Sources whose shapes and takers are alike, as a model's layers are, are cut once.

    Args:
        rank: that plans.
        num_ranks: of the shard group.
        bucket_elements: a window is halved until no rank needs more than a quarter of this, which
            leaves little of the buckets unused.
    """

    def __init__(self, rank: int, num_ranks: int, bucket_elements: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._bucket_elements = bucket_elements
        self._known: dict[Any, tuple[list[Window], list[str]]] = {}

    def of(self, source: SourceLayout, takers: Sequence[tuple[int, TracedCopy]]) -> list[Window]:
        """A source's windows, in order.

        Args:
            source: the checkpoint tensor.
            takers: who copies what of it, by rank.
        """
        parameters = list(dict.fromkeys(copy.parameter for _, copy in takers))
        number = {name: index for index, name in enumerate(parameters)}
        geometry = tuple((r, c.region, number[c.parameter], c.offset) for r, c in takers)
        key = (source.shape, source.num_shards, source.dim, geometry)
        if key not in self._known:
            self._known[key] = (list(self._cut(source, takers)), parameters)
        windows, names = self._known[key]
        renamed = dict(zip(names, parameters, strict=True))
        return [
            Window(window.load, [_renamed(m, source.name, renamed) for m in window.messages])
            for window in windows
        ]

    def _cut(
        self, source: SourceLayout, takers: Sequence[tuple[int, TracedCopy]]
    ) -> Iterator[Window]:
        if not takers:
            return
        # Ranks with the same slice of an engine make the same copies.
        receivers: dict[TracedCopy, list[int]] = {}
        for receiver, copy in takers:
            receivers.setdefault(copy, []).append(receiver)
        shards = [source.region(shard) for shard in range(source.num_shards)]
        wanted = [
            [
                _Wanted(part, np.array(who))
                for copy, who in receivers.items()
                if (part := common_part(copy, shard)) is not None
            ]
            for shard in shards
        ]
        parts = [(0, max(shard.shape[0] for shard in shards))]
        while parts:
            start, rows = parts.pop()
            window = self._window(source.name, shards, wanted, start, rows)
            if rows > 1 and 4 * window.load.max() > self._bucket_elements:
                # The first half is popped first.
                parts += [(start + rows // 2, rows - rows // 2), (start, rows // 2)]
            elif window.load.any():
                yield window

    def _window(
        self,
        source: str,
        shards: Sequence[Region],
        wanted: Sequence[list[_Wanted]],
        start: int,
        rows: int,
    ) -> Window:
        """What moves of rows [start, start + rows) of every shard to other ranks."""
        load = np.zeros(self._num_ranks, dtype=np.int64)
        messages = []
        for sender, shard in enumerate(shards):
            height = min(rows, shard.shape[0] - start)
            if height <= 0:
                continue
            held = Region((shard.offset[0] + start, *shard.offset[1:]), (height, *shard.shape[1:]))
            by_region: dict[Region, list[_Wanted]] = {}
            for part in wanted[sender]:
                piece = common_part(part.copy, held)
                if piece is not None:
                    by_region.setdefault(piece.region, []).append(_Wanted(piece, part.receivers))
            for region, pieces in by_region.items():
                others = _others(pieces, sender)
                if not len(others):
                    continue
                size = _aligned(math.prod(region.shape))
                load[sender] += size
                load[others] += size
                if self._rank == sender or (others == self._rank).any():
                    messages.append(Message(source, region, sender, _takers(pieces, sender)))
        return Window(load, messages)


def _others(pieces: Sequence[_Wanted], sender: int) -> NDArray[np.int64]:
    """Everybody but the sender who takes one of these, once, in the order of ranks."""
    first, *more = (piece.receivers for piece in pieces)
    everybody = np.unique(np.concatenate([first, *more])) if more else first
    return everybody[everybody != sender]


def _takers(pieces: Sequence[_Wanted], sender: int) -> tuple[Takers, ...]:
    """The same by where they put it."""
    groups = (
        (tuple(piece.receivers[piece.receivers != sender].tolist()), piece.copy) for piece in pieces
    )
    return tuple(Takers(who, copy.parameter, copy.offset) for who, copy in groups if who)


def _renamed(message: Message, source: str, parameters: Mapping[str, str]) -> Message:
    """The same message of another source, for other parameters."""
    if message.source == source:
        return message
    takers = tuple([Takers(t.receivers, parameters[t.parameter], t.offset) for t in message.takers])
    return Message(source, message.region, message.sender, takers)


def fill_buckets(windows: Iterable[Window], bucket_elements: int) -> Iterator[list[Message]]:
    """Join consecutive windows as long as no rank needs more than a bucket."""
    current: list[Message] = []
    load: NDArray[np.int64] | None = None
    for window in windows:
        total = window.load if load is None else load + window.load
        if load is not None and total.max() > bucket_elements:
            yield current
            current, total = [], window.load
        current.extend(window.messages)
        load = total
    if load is not None:
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
