"""From a plan to pieces: which numbers each copy has, for buffers that are numbered.

buffers = shards of all sources, all parameters, the two halves of the staging memory
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hybridrl.distributed.regions import TracedCopy
from hybridrl.reshard.copies import Buffers, Copies, Job, build_copies
from hybridrl.reshard.fingerprint import Hashes, salt
from hybridrl.reshard.layout import SourceLayout
from hybridrl.reshard.messages import Message
from hybridrl.reshard.pieces import Piece, Place, cut
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.verify import Sums


@dataclass(frozen=True)
class Programs:
    """What a move runs on the device.

    Attributes:
        local: from this rank's shards into its parameters.
        pack, unpack: into and out of staging memory, by bucket.
    """

    local: Copies
    pack: list[Copies]
    unpack: list[Copies]


class Tables:
    """The pieces of one rank's plan.

    Args:
        plan: what this rank does.
        rank: its position in the shard group.
        sources: layouts of all sources, in the order of their buffers.
        shapes: of the engine's parameters.
        sums: where fingerprints of what is sent are counted.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sources: Sequence[SourceLayout],
        shapes: dict[str, tuple[int, ...]],
        sums: Sums,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._sources = {source.name: (i, source) for i, source in enumerate(sources)}
        self._shapes = shapes
        self._parameters = {name: i for i, name in enumerate(plan.parameters)}
        self.num_buckets = len(plan.buckets)
        self._sums = sums

    def local(self) -> list[Piece]:
        """From this rank's shards into its own parameters."""
        return [
            piece
            for copy in self._plan.local
            for piece in self._pieces(
                copy,
                self._shard(copy.source, copy.region.offset),
                self._parameter(copy, len(self._sources)),
                self._sums.number([(self._rank, self._parameters[copy.parameter])]),
            )
        ]

    def pack(self, number: int) -> list[Piece]:
        """From this rank's shards into staging memory, for a bucket."""
        bucket = self._plan.buckets[number]
        return [
            piece
            for start, message in bucket.packed
            for piece in self._pieces(
                TracedCopy(message.source, message.region, "", ()),
                self._shard(message.source, message.region.offset),
                self._staging(number, start, message),
                self._sums.number(
                    (receiver, self._parameters[takers.parameter])
                    for takers in message.takers
                    for receiver in takers.receivers
                ),
            )
        ]

    def unpack(self, number: int) -> list[Piece]:
        """From staging memory into this rank's parameters, for a bucket."""
        bucket = self._plan.buckets[number]
        return [
            piece
            for start, message in bucket.unpacked
            for copy in self._taken(message)
            for piece in self._pieces(
                copy,
                self._staging(number, start, message),
                self._parameter(copy, len(self._sources)),
                0,
            )
        ]

    def found(self) -> list[Piece]:
        """This rank's parameters, to be read; the buffers, and the sums, are theirs alone."""
        return [
            piece
            for copy in self._plan.copies
            for place in [self._parameter(copy, first_buffer=0)]
            for piece in self._pieces(
                copy,
                place,
                place,
                self._parameters[copy.parameter],
            )
        ]

    def _taken(self, message: Message) -> Iterator[TracedCopy]:
        for takers in message.takers:
            if self._rank in takers.receivers:
                yield TracedCopy(message.source, message.region, takers.parameter, takers.offset)

    def _pieces(self, copy: TracedCopy, source: Place, target: Place, sum: int) -> Iterator[Piece]:
        whole = self._sources[copy.source][1].shape
        region = copy.region
        yield from cut(region.shape, source, target, (whole, region.offset), salt(copy.source), sum)

    def _shard(self, name: str, offset: Sequence[int]) -> Place:
        """Where an element of a whole source tensor lies in this rank's shard."""
        number, source = self._sources[name]
        held = source.region(self._rank)
        within = tuple(at - first for at, first in zip(offset, held.offset, strict=True))
        return Place(number, 0, held.shape, within)

    def _parameter(self, copy: TracedCopy, first_buffer: int) -> Place:
        number = first_buffer + self._parameters[copy.parameter]
        return Place(number, 0, self._shapes[copy.parameter], copy.offset)

    def _staging(self, number: int, start: int, message: Message) -> Place:
        half = len(self._sources) + len(self._parameters) + number % 2
        shape = message.region.shape
        return Place(half, start, shape, (0,) * len(shape))


def build_programs(
    tables: Tables, buffers: Buffers, dtype: torch.dtype, hashes: Hashes
) -> Programs:
    """Prepare a move for where the buffers lie now.

    Args:
        tables: of the plan.
        buffers: shards, parameters and staging memory.
        dtype: of parameters and staging memory.
        hashes: for fingerprints.
    """

    def copies(pieces: list[Piece]) -> Copies:
        return build_copies(Job(pieces, buffers, dtype, hashes, write=True))

    return Programs(
        local=copies(tables.local()),
        pack=[copies(tables.pack(number)) for number in range(tables.num_buckets)],
        unpack=[copies(tables.unpack(number)) for number in range(tables.num_buckets)],
    )


def largest_index(sources: Sequence[SourceLayout]) -> tuple[int, int]:
    """Most rows and most columns of any source, seen as rows of its last dim."""
    rows = [1]
    for source in sources:
        height = 1
        for size in source.shape[:-1]:
            height *= size
        rows.append(height)
    return max(rows), max(source.shape[-1] for source in sources)
