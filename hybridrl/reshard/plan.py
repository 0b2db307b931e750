"""Which bytes go where in a reshard: a pure function of layouts and traces.

Every rank computes the same global sequence of transfers and keeps its own part of it; because
the sequence is the same, no sizes or headers are exchanged when data moves.

    source layouts (FSDP2 shards)  ---+
                                      +--> intersect -> windows of rows -> buckets
    traces (what vLLM's loader does) -+
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.reshard.layout import SourceLayout, intersect


class Transfer(NamedTuple):
    """One move: a region of a source tensor from one shard to a parameter of another.

    `sender` and `receiver` number the ranks of the shard group. `offset` is where the region
    lies in the parameter; its shape there is the region's.
    """

    source: str
    region: Region
    sender: int
    receiver: int
    parameter: str
    offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements moved."""
        return math.prod(self.region.shape)


@dataclass(frozen=True)
class Bucket:
    """One rank's part of the transfers that move together.

    Attributes:
        local: within this rank.
        sends: from this rank, by receiver, in the global order for each.
        receives: to this rank, by sender, in the global order for each.
        moves_data: whether any rank of the group sends in this bucket.
    """

    local: list[Transfer]
    sends: list[list[Transfer]]
    receives: list[list[Transfer]]
    moves_data: bool

    @property
    def send_sizes(self) -> list[int]:
        """Elements for each receiver."""
        return [sum(transfer.numel for transfer in part) for part in self.sends]

    @property
    def receive_sizes(self) -> list[int]:
        """Elements from each sender."""
        return [sum(transfer.numel for transfer in part) for part in self.receives]


@dataclass(frozen=True)
class Plan:
    """What one rank does in a reshard.

    Attributes:
        buckets: as many on every rank of the group.
        copies: the whole regions this rank receives, before they were cut into transfers.
        fills: constants (vocabulary padding), written every time.
        gathered: sources that are gathered whole and go through the loader, for parameters that
            some rank's trace refused.
        parameters: names of the engine's parameters, in one order on all ranks.
    """

    buckets: list[Bucket]
    copies: list[TracedCopy]
    fills: list[TracedFill]
    gathered: list[str]
    parameters: list[str]


def build_plan(
    sources: Sequence[SourceLayout],
    traces: Sequence[Trace],
    rank: int,
    bucket_elements: int,
) -> Plan:
    """The plan of rank number `rank` of a shard group.

    Args:
        sources: layout of every checkpoint tensor over the group.
        traces: of the group's ranks, in order.
        rank: position in the group.
        bucket_elements: most elements that any rank sends or receives in one bucket, as long as
            one row of one tensor fits.

    Raises:
        ValueError: the group's models differ, or an element of a parameter would be written not
            at all or twice; names the parameters.
    """
    parameters = list(traces[0].parameters)
    if any(list(trace.parameters) != parameters for trace in traces):
        raise ValueError("the ranks' engines have different parameters")
    for trace in traces:
        check_coverage(trace)
    taken: dict[str, list[tuple[int, TracedCopy]]] = {source.name: [] for source in sources}
    for receiver, trace in enumerate(traces):
        for copy in trace.copies:
            taken[copy.source].append((receiver, copy))
    windows = [
        window
        for source in sources
        for window in _windows(source, taken[source.name], bucket_elements // len(traces))
    ]
    return Plan(
        buckets=[
            _bucket(part, rank, len(traces))
            for part in _fill_buckets(windows, len(traces), bucket_elements)
        ],
        copies=traces[rank].copies,
        fills=traces[rank].fills,
        gathered=_gathered(sources, traces),
        parameters=parameters,
    )


def digest(sources: Sequence[SourceLayout], traces: Sequence[Trace], bucket_elements: int) -> str:
    """A hash of everything a plan is computed from, for comparison across ranks."""
    inputs = (list(sources), list(traces), bucket_elements)
    return hashlib.blake2b(repr(inputs).encode(), digest_size=16).hexdigest()


def check_coverage(trace: Trace) -> None:
    """Every element of every parameter that was not refused is written exactly once.

    Raises:
        ValueError: names the parameters, how much of them is written, and overlaps.
    """
    regions: dict[str, list[Region]] = {
        name: [] for name in trace.parameters if name not in trace.refused
    }
    for copy in trace.copies:
        regions[copy.parameter].append(copy.destination)
    for fill in trace.fills:
        regions[fill.parameter].append(fill.region)
    problems = []
    for name, parts in regions.items():
        size = math.prod(trace.parameters[name])
        written = sum(math.prod(part.shape) for part in parts)
        overlap = any(intersect(a, b) for i, a in enumerate(parts) for b in parts[:i])
        if overlap or written != size:
            what = ", some twice" if overlap else ""
            problems.append(f"{name}: {written} of {size} elements{what}")
    if problems:
        raise ValueError(
            "the checkpoint's tensors do not cover the rollout engine's parameters:\n  "
            + "\n  ".join(problems)
        )


def _windows(
    source: SourceLayout, taken: Sequence[tuple[int, TracedCopy]], window_elements: int
) -> Iterator[list[Transfer]]:
    """The transfers of a source to who takes them, a few rows of each shard at a time.

    All shards go through their rows together, so that in a bucket every rank has something to
    send; a rank sends or receives at most `window_elements` times the group's size in a window.
    """
    row = math.prod(source.shape[1:])
    step = max(1, window_elements // max(1, row))
    for start in range(0, source.rows_per_shard, step):
        yield list(_transfers(source, taken, start, min(step, source.rows_per_shard - start)))


def _transfers(
    source: SourceLayout, taken: Sequence[tuple[int, TracedCopy]], start: int, rows: int
) -> Iterator[Transfer]:
    """What moves of rows [start, start + rows) of every shard."""
    for receiver, copy in taken:
        first, size = copy.region.offset[0], copy.region.shape[0]
        holders = range(
            first // source.rows_per_shard,
            min(-(-(first + size) // source.rows_per_shard), source.num_shards),
        )
        for sender in holders:
            shard = source.region(sender)
            height = min(rows, shard.shape[0] - start)
            window = Region(
                (shard.offset[0] + start, *shard.offset[1:]), (height, *shard.shape[1:])
            )
            region = intersect(window, copy.region)
            if region is not None:
                offset = tuple(
                    at + r - c
                    for at, r, c in zip(copy.offset, region.offset, copy.region.offset, strict=True)
                )
                yield Transfer(source.name, region, sender, receiver, copy.parameter, offset)


def _fill_buckets(
    windows: Sequence[list[Transfer]], num_ranks: int, bucket_elements: int
) -> Iterator[list[Transfer]]:
    """Join consecutive windows as long as no rank sends or receives more than a bucket."""
    current: list[Transfer] = []
    load = [0] * (2 * num_ranks)
    for window in windows:
        added = [0] * (2 * num_ranks)
        for transfer in window:
            if transfer.sender != transfer.receiver:
                added[transfer.sender] += transfer.numel
                added[num_ranks + transfer.receiver] += transfer.numel
        total = [a + b for a, b in zip(load, added, strict=True)]
        if current and max(total) > bucket_elements:
            yield current
            current, total = [], added
        current.extend(window)
        load = total
    if current:
        yield current


def _bucket(transfers: Sequence[Transfer], rank: int, num_ranks: int) -> Bucket:
    bucket = Bucket(
        local=[t for t in transfers if t.sender == rank == t.receiver],
        sends=[[] for _ in range(num_ranks)],
        receives=[[] for _ in range(num_ranks)],
        moves_data=any(t.sender != t.receiver for t in transfers),
    )
    for transfer in transfers:
        if transfer.sender == transfer.receiver:
            continue
        if transfer.sender == rank:
            bucket.sends[transfer.receiver].append(transfer)
        if transfer.receiver == rank:
            bucket.receives[transfer.sender].append(transfer)
    return bucket


def _gathered(sources: Sequence[SourceLayout], traces: Sequence[Trace]) -> list[str]:
    """The sources that some rank's refused parameters are made of."""
    needed = {
        name for trace in traces for refusal in trace.refused.values() for name in refusal.sources
    }
    return [source.name for source in sources if source.name in needed]
