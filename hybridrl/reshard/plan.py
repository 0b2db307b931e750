"""Reshard plan: a pure function of layouts and traces.

Every rank computes the same global sequence of transfers and keeps its own part. Since the
sequence is the same, no sizes or headers are exchanged when data moves.

    source layouts (FSDP2 shards)  ---+                +-> local copies
                                      +--> intersect --+
    traces (copies of vLLM's loader) -+                +-> transfers -> chunks -> buckets
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.reshard.buckets import Bucket, bucket_of, fill_buckets
from hybridrl.reshard.source_layout import SourceLayout, intersect
from hybridrl.reshard.transfers import Chunker, common_part


@dataclass(frozen=True)
class Plan:
    """All that one rank does in a reshard.

    Attributes:
        sources: names of the weights that are moved.
        local: copies out of this rank's own shards; regions of whole source tensors.
        buckets: exchanges in order; the same number on every rank of the group.
        copies: all copies into this rank's parameters, before they are cut.
        fills: constants (vocabulary padding), written every time.
        gathered: sources that are gathered whole and loaded by the engine's loader, because
            some rank's trace refused their parameters.
        parameters: names of the engine's parameters, in one order on all ranks.
        received: elements this rank receives from others.
        unavoidable: elements it would receive if it used all of its own shards.
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
        """Elements of parameters that this rank writes, without constants and loaders."""
        return sum(math.prod(copy.region.shape) for copy in self.copies)

    @property
    def exchanges_much(self) -> bool:
        """True if links, which are over ten times slower than memory, limit the move."""
        return 32 * self.received > sum(math.prod(copy.region.shape) for copy in self.local)


@garbage_collection_off()
def build_plans(
    sources: Sequence[SourceLayout],
    frozen: Collection[str],
    traces: Sequence[Trace],
    rank: int,
    bucket_elements: int,
) -> list[Plan]:
    """Return the plans of one rank of a shard group, that of frozen weights first.

    Together they write the same as one plan of all weights. Constants belong to the first.

    Args:
        sources: layout of every checkpoint tensor over the group.
        frozen: names of the tensors that never change; if empty, one plan covers all.
        traces: of the group's ranks, in order.
        rank: position in the group.
        bucket_elements: limit on any rank's staging memory for one bucket, sent and received
            together, as long as one row of one tensor fits.

    Raises:
        ValueError: the group's models differ, or an element of a parameter would not be written
            exactly once; names the parameters.
    """
    parameters = list(traces[0].parameters)
    if any(list(trace.parameters) != parameters for trace in traces):
        raise ValueError("the ranks' engines have different parameters")
    checked: list[Trace] = []
    for trace in traces:  # ranks with the same slice of an engine have the same trace
        if trace not in checked:
            check_coverage(trace)
            checked.append(trace)
    never_change = set(frozen)
    parts = [[s for s in sources if (s.name in never_change) is first] for first in (True, False)]
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
    """Return the plan for these sources; traces copy from no others."""
    copies = _copies_of(sources, traces)
    chunker = Chunker(rank, len(traces), bucket_elements)
    chunks = [chunk for source in sources for chunk in chunker.chunks(source, copies[source.name])]
    # Transfers to many ranks come first, so that few buckets go to many.
    chunks.sort(key=lambda chunk: -chunk.breadth)
    buckets = [bucket_of(part, rank, len(traces)) for part in fill_buckets(chunks, bucket_elements)]
    own_copies = traces[rank].copies
    local = [
        part
        for source in sources
        for receiver, copy in copies[source.name]
        if receiver == rank and (part := common_part(copy, source.region(rank))) is not None
    ]
    held = sum(math.prod(s.region(rank).shape) for s in sources if copies[s.name])
    return Plan(
        sources=frozenset(source.name for source in sources),
        local=local,
        buckets=buckets,
        copies=own_copies,
        fills=traces[rank].fills,
        gathered=_gathered(sources, traces),
        parameters=list(traces[0].parameters),
        received=sum(bucket.received for bucket in buckets),
        unavoidable=max(0, sum(math.prod(copy.region.shape) for copy in own_copies) - held),
    )


def digest(sources: Sequence[SourceLayout], traces: Sequence[Trace], bucket_elements: int) -> str:
    """Return a hash of all inputs of a plan, for comparison across ranks."""
    inputs = (list(sources), list(traces), bucket_elements)
    return hashlib.blake2b(repr(inputs).encode(), digest_size=16).hexdigest()


def check_coverage(trace: Trace) -> None:
    """Check that every element of every traced parameter is written exactly once.

    Raises:
        ValueError: names the parameters, the elements written, and overlaps.
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
            twice = ", some twice" if overlap else ""
            problems.append(f"{name}: {written} of {size} elements{twice}")
    if problems:
        raise ValueError(
            "the checkpoint's tensors do not cover the rollout engine's parameters:\n  "
            + "\n  ".join(problems)
        )


def _copies_of(
    sources: Sequence[SourceLayout], traces: Sequence[Trace]
) -> dict[str, list[tuple[int, TracedCopy]]]:
    """Return all copies of each source, each with its rank."""
    copies: dict[str, list[tuple[int, TracedCopy]]] = {source.name: [] for source in sources}
    for receiver, trace in enumerate(traces):
        for copy in trace.copies:
            copies[copy.source].append((receiver, copy))
    return copies


def _gathered(sources: Sequence[SourceLayout], traces: Sequence[Trace]) -> list[str]:
    """Return the sources of all refused parameters of all ranks."""
    needed = {
        name for trace in traces for refusal in trace.refused.values() for name in refusal.sources
    }
    return [source.name for source in sources if source.name in needed]
