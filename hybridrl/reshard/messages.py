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


@dataclass(frozen=True)
class Bucket:
    """One rank's part of what moves together, and where it lies in staging memory.

    slots of an all-gather, one a rank | what this rank sends | what it receives

    Attributes:
        slot: elements of a slot; 0 if nothing is gathered.
        sends, receives: the other rank, and the part of staging memory that is sent or received;
            those between two ranks in one order on both.
        packed, unpacked: each message to others or from others, and where it begins.
        size: elements of staging memory.
    """

    slot: int
    sends: list[tuple[int, slice]]
    receives: list[tuple[int, slice]]
    packed: list[tuple[int, Message]]
    unpacked: list[tuple[int, Message]]
    size: int

    @property
    def operations(self) -> int:
        """Sends, receives and all-gathers that this rank takes part in."""
        return len(self.sends) + len(self.receives) + (self.slot > 0)

    @property
    def received(self) -> int:
        """Elements of weights that this rank receives."""
        return sum(message.numel for _, message in self.unpacked)


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
        slot: elements that each rank gives to an all-gather; 0: the messages are sent.
        breadth: most ranks that receive one message.
        messages: those that the rank which plans sends or receives.
    """

    load: NDArray[np.int64]
    slot: int
    breadth: int
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
            window._replace(messages=[_renamed(m, source.name, renamed) for m in window.messages])
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
        """What moves of rows [start, start + rows) of every shard to other ranks.

        Messages that all go to everybody are gathered: one operation instead of two for each other
        rank. Between two ranks a send is faster, and slots that few ranks fill are a waste.
        """
        sent, received = np.zeros((2, self._num_ranks), dtype=np.int64)
        breadths, messages = {0}, []
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
                sent[sender] += size
                received[others] += size
                breadths.add(len(others))
                if self._rank == sender or (others == self._rank).any():
                    messages.append(Message(source, region, sender, _takers(pieces, sender)))
        breadth, slot = max(breadths), int(sent.max())
        to_everybody = breadth > 1 and breadths == {0, self._num_ranks - 1}
        if to_everybody and slot * self._num_ranks <= 2 * sent.sum():
            return Window(np.full_like(sent, slot * self._num_ranks), slot, breadth, messages)
        return Window(sent + received, 0, breadth, messages)


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


def fill_buckets(windows: Iterable[Window], bucket_elements: int) -> Iterator[list[Window]]:
    """Join consecutive windows as long as no rank needs more than a bucket."""
    current: list[Window] = []
    load = np.zeros(1, dtype=np.int64)
    for window in windows:
        total = load + window.load
        if current and total.max() > bucket_elements:
            yield current
            current, total = [], window.load
        current.append(window)
        load = total
    if current:
        yield current


def bucket_of(windows: Sequence[Window], rank: int, num_ranks: int) -> Bucket:
    """A rank's part of a bucket. What one rank sends to the same others is one send to each."""
    slot = sum(window.slot for window in windows)
    ends = [number * slot for number in range(num_ranks)]
    placed: list[tuple[int, Message]] = []
    sections: dict[tuple[bool, int, tuple[int, ...]], list[Message]] = {}
    for message, is_gathered in ((m, w.slot > 0) for w in windows for m in w.messages):
        if is_gathered:
            placed.append((ends[message.sender], message))
            ends[message.sender] += _aligned(message.numel)
        else:
            key = (message.sender != rank, message.sender, message.receivers)
            sections.setdefault(key, []).append(message)
    sends: list[tuple[int, slice]] = []
    receives: list[tuple[int, slice]] = []
    end = num_ranks * slot
    for (_, sender, receivers), messages in sorted(sections.items()):
        begin = end
        for message in messages:
            placed.append((end, message))
            end += _aligned(message.numel)
        if sender == rank:
            sends += [(receiver, slice(begin, end)) for receiver in receivers]
        else:
            receives.append((sender, slice(begin, end)))
    return Bucket(
        slot=slot,
        sends=sends,
        receives=receives,
        packed=[(place, message) for place, message in placed if message.sender == rank],
        unpacked=[(place, message) for place, message in placed if message.sender != rank],
        size=end,
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
