"""Stall report: evidence from the nodes, the suspected ranks of a stalled call, and its text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.placement import Host, Slot, by_node
from hybridrl.controller.ray.compat import actor_state
from hybridrl.controller.watch.flight_recorder import NCCL_PREFIX
from hybridrl.controller.watch.process_snapshot import (
    GONE,
    NO_STACKS,
    STOPPED,
    Traces,
    process_snapshots,
    write_traces,
)
from hybridrl.distributed.background import call_with_timeout
from hybridrl.distributed.position import Position

# Number of ranks that a report describes one by one.
MAX_DESCRIBED = 8
IN_KERNEL = "D"
RAY_TIMEOUT_S = 2.0
# In this phase, processes have no ranks, and some may not be started.
FIRST_PHASE = "start: info"
# Progress of a rank with a position of an earlier call, or none.
NOT_BEGUN = (-1, 0)


class RankReport(NamedTuple):
    """Evidence about an unfinished rank: its position, if known, and a key of `_STATES`."""

    host: Host
    position: Position | None
    state: str
    traces: Traces = Traces("", [])


@dataclass(frozen=True)
class StallReport:
    """Report of a call that the ranks in `seen` have not finished.

    `phase` is the call, "rollout.reshard"; several methods are separated by commas.
    """

    phase: str
    seen: Sequence[RankReport]
    num_ranks: int

    def progress(self, rank: RankReport) -> tuple[int, int] | None:
        """Return the progress of a rank in the call, comparable; None if unknown."""
        position, phases = rank.position, self.phase.split(", ")
        if position is None:
            return None
        if position.is_idle or position.phase not in phases:
            return NOT_BEGUN
        return phases.index(position.phase), position.steps

    def suspects(self) -> list[RankReport]:
        """Return the ranks for which the others wait; none if all are alike.

        The first non-empty group of: stopped or dead processes; ranks behind others; ranks whose
        devices are behind; ranks that wait in the kernel.
        """
        halted = [s for s in self.seen if s.state in GONE or s.state in STOPPED]
        if halted:
            return halted
        known = [(s, p) for s in self.seen if (p := self.progress(s)) is not None]
        places = {progress for _, progress in known}
        if len(places) > 1 or len(self.seen) < self.num_ranks:
            return [s for s, progress in known if progress == min(places)]
        passed = {s.traces.passed for s in self.seen}
        if len(passed) > 1 and min(passed) >= 0:
            return [s for s in self.seen if s.traces.passed == min(passed)]
        in_kernel = [s for s in self.seen if s.state == IN_KERNEL]
        return in_kernel if len(in_kernel) < len(self.seen) else []

    def in_order(self) -> list[RankReport]:
        """Return suspects first, then the others by rank."""
        suspects = self.suspects()
        return suspects + [s for s in self.seen if s not in suspects]

    def summary(self) -> str:
        """Describe all ranks on one line: "rank 3 is in bucket 17 of 24, ranks 0-2 are in ..."."""
        groups: dict[str, list[int]] = {}
        for rank in sorted(self.seen, key=lambda s: self.progress(s) or NOT_BEGUN):
            groups.setdefault(place_in(self.phase, rank.position), []).append(rank.host.rank)
        texts = [f"{format_ranks(ranks, 'is', 'are')} {place}" for place, ranks in groups.items()]
        finished = self.num_ranks - len(self.seen)
        if finished:
            texts.append(f"{finished} other{'s have' if finished > 1 else ' has'} finished")
        return ", ".join(texts)

    def describe(self, rank: RankReport) -> str:
        """Describe a rank: node, process, position, state, innermost line, log file."""
        state = _STATES.get(rank.state, "")
        if rank.state in STOPPED:
            state += f"; kill -CONT {rank.host.pid} resumes it"
        device = f"its device {rank.traces.device}" if rank.traces.device else ""
        parts = [place_in(self.phase, rank.position), state, device, rank.traces.frame]
        text = ", ".join(filter(None, parts))
        return f"  {rank.host.describe()}: {text}\n    {rank.host.log_file}"


def place_in(phase: str, position: Position | None) -> str:
    """Describe a place in a call after "is": "in bucket 17 of 24", "idle after actor.update"."""
    if position is None:
        return "nowhere yet" if phase == FIRST_PHASE else "at an unknown place"
    if position.is_idle:
        return f"idle after {position.phase}" if position.phase else "idle"
    if position.phase == phase:
        return position.within()
    return f"in {position.phase}, {position.within()}"


_STATES = {
    "": "its process has ended",
    "T": "stopped by a signal, as by kill -STOP, Ctrl-Z or a scheduler that suspends jobs",
    "t": "stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "in an uninterruptible wait of the kernel, as for an unresponsive file system",
    "?": "its node does not answer",
    "0": "Ray has not started it",
}


def format_report(stall: StallReport, finding: str, advice: str) -> str:
    """Format a report from its finding, "no rank made progress in ... for 600 s", to the advice."""
    ordered = stall.in_order()
    lines = [f"{finding}: {stall.summary()}."]
    lines += [stall.describe(rank) for rank in ordered[:MAX_DESCRIBED]]
    if len(ordered) > MAX_DESCRIBED:
        lines.append(f"  and {len(ordered) - MAX_DESCRIBED} more")
    if any(s.traces.frame not in ("", NO_STACKS) for s in stall.seen):
        lines.append("The stacks of their threads are at the end of their logs.")
    if stall.phase == FIRST_PHASE:
        lines.append("Ranks are assigned later: processes are numbered in order of creation.")
    lines += _about_records(path for s in stall.seen for path in s.traces.records)
    return "\n".join([*lines, advice])


def _about_records(paths: Iterable[str]) -> list[str]:
    """Name the files of the flight recorders, and the program that reads NCCL's."""
    files = [Path(path) for path in paths]
    folders = sorted({str(path.parent) for path in files})
    lines = [f"Their last collectives are in {folder}/*_trace_rank_*." for folder in folders]
    for folder in sorted({str(f.parent) for f in files if f.name.startswith(NCCL_PREFIX)}):
        program = "torchfrtrace --allow-incomplete-ranks --prefix"
        lines.append(f"To compare those of NCCL: {program} {NCCL_PREFIX} {folder}")
    return lines


def format_ranks(numbers: Sequence[int], verb: str, verbs: str) -> str:
    """Format ranks with a verb: "rank 3 is", "ranks 0-2 and 5 are"."""
    ordered = sorted(numbers)
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    listed = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"rank {listed} {verb}" if len(ordered) == 1 else f"ranks {listed} {verbs}"


def collect_report(
    nodes: NodeTasks, phase: str, late: Sequence[Host], num_ranks: int
) -> StallReport:
    """Collect position and state of unfinished ranks, without interfering with them."""
    late = [host if host.pid else _completed_from_ray(host) for host in late]
    seen = _on_nodes(nodes, late, process_snapshots, lambda hosts: ([h.pid for h in hosts],))
    reports = [RankReport(host, *seen.get(host, (None, "?" if host.pid else "0"))) for host in late]
    return StallReport(phase, reports, num_ranks)


def stall_error(nodes: NodeTasks, report: StallReport, finding: str, advice: str) -> WorkerError:
    """Build the error of a stalled call, after stacks and flight records are written."""
    written = _on_nodes(
        nodes,
        [rank.host for rank in report.seen],
        write_traces,
        lambda hosts: (
            [h.pid for h in hosts],
            [h.rank for h in hosts],
            [h.log_file for h in hosts],
        ),
    )
    seen = [rank._replace(traces=written.get(rank.host, rank.traces)) for rank in report.seen]
    report = replace(report, seen=seen)
    ordered = [rank.host for rank in report.in_order()]
    text = f"{format_report(report, finding, advice)}\n{ordered[0].log_tail()}".rstrip()
    return WorkerError([host.rank for host in ordered], report.phase, text)


def _on_nodes(
    nodes: NodeTasks,
    hosts: Sequence[Host],
    function: Callable[..., Sequence[Any]],
    arguments: Callable[[Sequence[Host]], tuple[Any, ...]],
) -> dict[Host, Any]:
    """Run a function on each node; return its results by the hosts there, as far as known."""
    members = by_node([host for host in hosts if host.pid])
    answers = nodes.run_each(function, {node: arguments(there) for node, there in members.items()})
    return {
        host: value
        for node, values in answers.items()
        for host, value in zip(members[node], values, strict=True)
    }


def _completed_from_ray(host: Host) -> Host:
    """Complete a host without a report from Ray's record; no pid if not yet started."""
    try:
        entry = call_with_timeout(RAY_TIMEOUT_S, partial(actor_state, host.handle))
    except (TimeoutError, RayError):
        return host
    address = entry.get("Address", {})
    if not address.get("IPAddress"):
        return host
    node_id, pid = address["NodeID"], entry["Pid"]
    names = [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeID"] == node_id]
    name = names[0] if names else host.node_name
    return host._replace(
        slot=Slot(node_id, address["IPAddress"], host.slot.local_rank),
        pid=pid,
        node_name=name,
        log_file=host.log_file / f"{name}_pid{pid}.log",
    )
