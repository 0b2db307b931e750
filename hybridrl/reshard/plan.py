"""Reshard plan: a pure function of layouts and traces.

Every rank computes the same global sequence of transfers and keeps its own part. Since the
sequence is the same, no sizes or headers are exchanged when data moves.

    source layouts (FSDP2 shards)  ---+                +-> local copies
                                      +--> intersect --+
    traces (copies of vLLM's loader) -+                +-> transfers -> chunks -> buckets
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.regions import FP8, Region, Trace, TracedCopy, TracedFill
from hybridrl.distributed.weights import HEADS
from hybridrl.reshard.transfers import (
    Chunk,
    Chunker,
    SourceLayout,
    Transfer,
    aligned,
    common_part,
    intersect,
)

# Copies of each source, with the ranks that make them.
_Copies = Mapping[str, list[tuple[int, TracedCopy]]]


@dataclass(frozen=True)
class Bucket:
    """One rank's part of the transfers that move together, laid out in staging memory.

    slots of an all-gather, one a rank | send groups of this rank | those of other ranks

    A send group holds the transfers from one rank to the same receivers. It is one send to each.

    Attributes:
        slot: elements of a slot; 0 if nothing is gathered.
        sends, receives: the other rank, and the part of staging memory; of two ranks in one order.
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


@dataclass(frozen=True)
class Plan:
    """All that one rank does in a reshard.

    Attributes:
        sources: the weights that are moved.
        local: copies out of this rank's own shards; regions of whole source tensors.
        buckets: exchanges in order; the same number on every rank of the group.
        fills: constants (vocabulary padding), written every time.
        written: elements of parameters that this rank writes, without constants.
        received: elements this rank receives from others.
        frozen: the weights never change.
        dtype: dtype in which they move, as their targets; None: the engine's.
    """

    sources: list[SourceLayout]
    local: list[TracedCopy]
    buckets: list[Bucket]
    fills: list[TracedFill]
    written: int
    received: int
    frozen: bool = False
    dtype: torch.dtype | None = None

    @property
    def exchanges_much(self) -> bool:
        """True if links, which are over ten times slower than memory, limit the move."""
        return 32 * self.received > sum(copy.region.numel for copy in self.local)


@garbage_collection_off()
def build_plans(
    sources: Sequence[SourceLayout],
    frozen: Collection[str],
    traces: Sequence[Trace],
    rank: int,
    bucket_elements: int,
    others: Sequence[Trace] = (),
) -> list[Plan]:
    """Return the plans of one rank of a route, those of frozen weights first.

    Targets of float32 in an engine of another dtype have plans of their own, and so have those of
    FP8. Constants belong to the first plan.

    Args:
        sources: layout of every checkpoint tensor over the first ranks of the route.
        frozen: names of the tensors that never change; if empty, one plan covers all.
        traces: of the route's ranks, in order; empty for a rank without an engine.
        rank: position in the route.
        bucket_elements: limit on any rank's staging memory for one bucket, sent and received
            together, as long as one row fits; of 2 bytes each where a plan has its own dtype.
        others: traces of other routes, whose ranks have as many plans.

    Raises:
        ValueError: an element of a parameter would not be written exactly once, or a tensor would
            not be read; names them.
    """
    checked: list[Trace] = []
    for trace in (*traces, *others):  # ranks with the same slice of an engine have the same trace
        if trace not in checked:
            check_coverage(trace)
            checked.append(trace)
    dtypes = {name: dtype for trace in checked for name, dtype in trace.dtypes.items()}
    written = {(c.source, dtypes.get(c.parameter)) for trace in checked for c in trace.copies}
    read = {source for source, _ in written}
    # An engine reads no head that is tied to its embedding; one of its own would lack weights.
    known = read | {*HEADS}
    unread = [source.name for source in sources if source.name not in known]
    if read and unread:
        raise ValueError(f"the rollout engine's model has no place for {', '.join(unread)}")
    never_change = set(frozen)
    plans: list[Plan] = []
    for is_frozen, dtype in itertools.product((True, False), (None, torch.float32, FP8)):
        part = [
            source
            for source in sources
            if (source.name in never_change) is is_frozen
            and ((source.name, dtype) in written or not (dtype or source.name in read))
        ]
        copies: _Copies = {source.name: [] for source in part}
        for receiver, trace in enumerate(traces):
            for copy in trace.copies:
                if copy.source in copies and dtypes.get(copy.parameter) is dtype:
                    copies[copy.source].append((receiver, copy))
        if part or not (is_frozen or dtype):
            size = bucket_elements if dtype is None else 2 * bucket_elements // dtype.itemsize
            plan = _plan(part, copies, rank, len(traces), size)
            fills = [] if plans else traces[rank].fills
            plans.append(replace(plan, fills=fills, frozen=is_frozen, dtype=dtype))
    return plans


def _plan(
    sources: list[SourceLayout], copies: _Copies, rank: int, num_ranks: int, bucket_elements: int
) -> Plan:
    """Return the plan for these sources."""
    chunker = Chunker(rank, num_ranks, bucket_elements)
    chunks = [chunk for source in sources for chunk in chunker.chunks(source, copies[source.name])]
    # Transfers to many ranks come first, so that few buckets go to many.
    chunks.sort(key=lambda chunk: -chunk.breadth)
    buckets = [bucket_of(part, rank, num_ranks) for part in fill_buckets(chunks, bucket_elements)]
    held = {source.name: source.region(rank) for source in sources}
    return Plan(
        sources=sources,
        local=[
            part
            for source in sources
            for receiver, copy in copies[source.name]
            if receiver == rank and (part := common_part(copy, held[source.name])) is not None
        ],
        buckets=buckets,
        fills=[],
        written=sum(c.region.numel for parts in copies.values() for r, c in parts if r == rank),
        received=sum(
            transfer.copy.region.numel for bucket in buckets for _, transfer in bucket.unpacked
        ),
    )


def check_coverage(trace: Trace) -> None:
    """Raise a ValueError unless every element of every traced parameter is written exactly once."""
    regions: dict[str, list[Region]] = {name: [] for name in trace.parameters}
    for copy in trace.copies:
        regions[copy.parameter].append(copy.destination)
    for fill in trace.fills:
        regions[fill.parameter].append(fill.region)
    problems = []
    for name, parts in regions.items():
        size = math.prod(trace.parameters[name])
        written = sum(part.numel for part in parts)
        overlap = _overlap(parts)
        if overlap or written != size:
            twice = ", some twice" if overlap else ""
            problems.append(f"{name}: {written} of {size} elements{twice}")
    if problems:
        raise ValueError(
            "the checkpoint's tensors do not cover the rollout engine's parameters:\n  "
            + "\n  ".join(problems)
        )


def _overlap(regions: list[Region]) -> bool:
    """Return whether two of the regions of a tensor intersect; in order of their first dim."""
    ordered = sorted(regions)
    for number, region in enumerate(ordered):
        end = region.offset[0] + region.shape[0] if region.shape else 1
        for other in ordered[number + 1 :]:
            if other.offset[:1] >= (end,):
                break
            if intersect(region, other):
                return True
    return False


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
            ends[transfer.sender] += aligned(transfer.copy.region.numel)
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
            end += aligned(transfer.copy.region.numel)
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
