"""Which bytes go where in a reshard: a pure function of layouts and traces.

Every rank computes the same global sequence of messages and keeps its own part of it; because
the sequence is the same, no sizes or headers are exchanged when data moves.

    source layouts (FSDP2 shards)  ---+                +-> local copies
                                      +--> intersect --+
    traces (what vLLM's loader does) -+                +-> messages -> windows -> buckets
"""

import gc
import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.reshard.layout import SourceLayout, intersect
from hybridrl.reshard.messages import Bucket, Windows, bucket_of, common_part, fill_buckets


@dataclass(frozen=True)
class Plan:
    """What one rank does in a reshard.

    Attributes:
        sources: names of the weights that are moved.
        local: copies out of this rank's own shards; regions of whole source tensors.
        buckets: what is exchanged, in order; as many on every rank of the group.
        copies: the whole regions this rank receives, before they were cut into pieces.
        fills: constants (vocabulary padding), written every time.
        gathered: sources that are gathered whole and go through the loader, for parameters that
            some rank's trace refused.
        parameters: names of the engine's parameters, in one order on all ranks.
        received: elements this rank receives from others.
        unavoidable: elements it would receive if its own shards were all of use to it.
    """

    sources: frozenset[str]
    local: list[TracedCopy]
    buckets: list[Bucket]
    copies: list[TracedCopy]
    fills: list[TracedFill]
    gathered: list[str]
    parameters: list[str]
    received: int
    unavoidable: int

    @property
    def written(self) -> int:
        """Elements of its parameters that this rank writes, constants and loaders apart."""
        return sum(math.prod(copy.region.shape) for copy in self.copies)

    @property
    def exchanges_much(self) -> bool:
        """Whether the links matter, and not memory alone: they are over ten times slower."""
        return 32 * self.received > sum(math.prod(copy.region.shape) for copy in self.local)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let nobody look for cycles among the many tuples that are made: there are none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collection()
def build_plans(
    sources: Sequence[SourceLayout],
    frozen: Collection[str],
    traces: Sequence[Trace],
    rank: int,
    bucket_elements: int,
) -> list[Plan]:
    """The plans of rank number `rank` of a shard group, that of frozen weights first.

    Together they write what one plan of all weights would; constants are the first one's part.

    Args:
        sources: layout of every checkpoint tensor over the group.
        frozen: names of those that never change. Without any there is only one plan, of all.
        traces: of the group's ranks, in order.
        rank: position in the group.
        bucket_elements: most elements of staging memory that any rank needs for one bucket, for
            what it sends and receives together, as long as one row of one tensor fits.

    Raises:
        ValueError: the group's models differ, or an element of a parameter would be written not
            at all or twice; names the parameters.
    """
    parameters = list(traces[0].parameters)
    if any(list(trace.parameters) != parameters for trace in traces):
        raise ValueError("the ranks' engines have different parameters")
    checked: list[Trace] = []
    for trace in traces:  # ranks with the same slice of an engine have the same trace
        if trace not in checked:
            check_coverage(trace)
            checked.append(trace)
    still = set(frozen)
    parts = [[s for s in sources if (s.name in still) is first] for first in (True, False)]
    if not parts[0]:
        return [_plan(sources, traces, rank, bucket_elements)]
    plans = []
    for part in parts:
        names = {source.name for source in part}
        own = [
            trace._replace(
                copies=[copy for copy in trace.copies if copy.source in names],
                fills=trace.fills if part is parts[0] else [],
            )
            for trace in traces
        ]
        plans.append(_plan(part, own, rank, bucket_elements))
    return plans


def _plan(
    sources: Sequence[SourceLayout], traces: Sequence[Trace], rank: int, bucket_elements: int
) -> Plan:
    """The plan for these sources; traces copy from no others."""
    takers = _takers(sources, traces)
    windows = Windows(rank, len(traces), bucket_elements)
    cut = [window for source in sources for window in windows.of(source, takers[source.name])]
    # What many ranks take comes together, so that few buckets go to many.
    cut.sort(key=lambda window: -window.breadth)
    buckets = [bucket_of(part, rank, len(traces)) for part in fill_buckets(cut, bucket_elements)]
    taken = traces[rank].copies
    local = [
        piece
        for source in sources
        for receiver, copy in takers[source.name]
        if receiver == rank and (piece := common_part(copy, source.region(rank))) is not None
    ]
    held = sum(math.prod(s.region(rank).shape) for s in sources if takers[s.name])
    return Plan(
        sources=frozenset(source.name for source in sources),
        local=local,
        buckets=buckets,
        copies=taken,
        fills=traces[rank].fills,
        gathered=_gathered(sources, traces),
        parameters=list(traces[0].parameters),
        received=sum(bucket.received for bucket in buckets),
        unavoidable=max(0, sum(math.prod(copy.region.shape) for copy in taken) - held),
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


def _takers(
    sources: Sequence[SourceLayout], traces: Sequence[Trace]
) -> dict[str, list[tuple[int, TracedCopy]]]:
    """Who copies what of each source, over all ranks of the group."""
    takers: dict[str, list[tuple[int, TracedCopy]]] = {source.name: [] for source in sources}
    for receiver, trace in enumerate(traces):
        for copy in trace.copies:
            takers[copy.source].append((receiver, copy))
    return takers


def _gathered(sources: Sequence[SourceLayout], traces: Sequence[Trace]) -> list[str]:
    """The sources that some rank's refused parameters are made of."""
    needed = {
        name for trace in traces for refusal in trace.refused.values() for name in refusal.sources
    }
    return [source.name for source in sources if source.name in needed]
