"""Lowers a reshard plan to CopyRects over numbered buffers.

buffers = shards of all sources, all parameters, the two halves of the staging memory
"""

from collections.abc import Iterator, Sequence

from hybridrl.distributed.regions import TracedCopy
from hybridrl.reshard.buffers import BufferRegion
from hybridrl.reshard.fingerprint import salt
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.rects import CopyRect, cut
from hybridrl.reshard.source_layout import SourceLayout
from hybridrl.reshard.transfers import Transfer
from hybridrl.reshard.verify import FingerprintSums


class LoweredPlan:
    """Rectangles of one rank's plan.

    Args:
        plan: plan of this rank.
        rank: this rank's position in the shard group.
        sources: layouts of all sources, in the order of their buffers.
        shapes: shapes of the engine's parameters.
        sums: sums of the fingerprints that are sent.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sources: Sequence[SourceLayout],
        shapes: dict[str, tuple[int, ...]],
        sums: FingerprintSums,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._sources = {source.name: (i, source) for i, source in enumerate(sources)}
        self._shapes = shapes
        self._parameters = {name: i for i, name in enumerate(plan.parameters)}
        self._sums = sums

    def local(self) -> list[CopyRect]:
        """Return the rectangles from this rank's shards into its own parameters."""
        return [
            rect
            for copy in self._plan.local
            for rect in self._rects(
                copy,
                self._shard(copy.source, copy.region.offset),
                self._parameter(copy, len(self._sources)),
                self._sums.number([(self._rank, self._parameters[copy.parameter])]),
            )
        ]

    def pack(self, number: int) -> list[CopyRect]:
        """Return the rectangles from this rank's shards into staging memory, for a bucket."""
        bucket = self._plan.buckets[number]
        return [
            rect
            for start, transfer in bucket.packed
            for rect in self._rects(
                TracedCopy(transfer.source, transfer.region, "", ()),
                self._shard(transfer.source, transfer.region.offset),
                self._staging(number, start, transfer),
                self._sums.number(
                    (receiver, self._parameters[copy.parameter])
                    for copy, receivers in transfer.writes
                    for receiver in receivers
                ),
            )
        ]

    def unpack(self, number: int) -> list[CopyRect]:
        """Return the rectangles from staging memory into this rank's parameters, for a bucket."""
        bucket = self._plan.buckets[number]
        return [
            rect
            for start, transfer in bucket.unpacked
            for copy, receivers in transfer.writes
            if self._rank in receivers
            for rect in self._rects(
                copy,
                self._staging(number, start, transfer),
                self._parameter(copy, len(self._sources)),
                0,
            )
        ]

    def written(self) -> list[CopyRect]:
        """Return the rectangles of this rank's parameters, to be read back.

        Buffers and sums are numbered by parameter alone.
        """
        return [
            rect
            for copy in self._plan.copies
            for region in [self._parameter(copy, first_buffer=0)]
            for rect in self._rects(copy, region, region, self._parameters[copy.parameter])
        ]

    def _rects(
        self, copy: TracedCopy, source: BufferRegion, target: BufferRegion, sum: int
    ) -> Iterator[CopyRect]:
        whole = self._sources[copy.source][1].shape
        region = copy.region
        yield from cut(region.shape, source, target, (whole, region.offset), salt(copy.source), sum)

    def _shard(self, name: str, offset: Sequence[int]) -> BufferRegion:
        """Return the region of this rank's shard that begins at an offset of the whole tensor."""
        number, source = self._sources[name]
        held = source.region(self._rank)
        within = tuple(at - first for at, first in zip(offset, held.offset, strict=True))
        return BufferRegion(number, 0, held.shape, within)

    def _parameter(self, copy: TracedCopy, first_buffer: int) -> BufferRegion:
        number = first_buffer + self._parameters[copy.parameter]
        return BufferRegion(number, 0, self._shapes[copy.parameter], copy.offset)

    def _staging(self, number: int, start: int, transfer: Transfer) -> BufferRegion:
        half = len(self._sources) + len(self._parameters) + number % 2
        shape = transfer.region.shape
        return BufferRegion(half, start, shape, (0,) * len(shape))
