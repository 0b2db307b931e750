"""Stall report: the suspected ranks of a stalled call, and its text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.placement import Host
from hybridrl.controller.watch.flight_recorder import NCCL_PREFIX
from hybridrl.controller.watch.process_snapshot import GONE, STOPPED, ProcessSnapshot, Traces
from hybridrl.distributed.position import Position

# Number of ranks that a report describes one by one.
MAX_DESCRIBED = 8
IN_KERNEL = "D"
# In this phase, processes have no ranks, and some may not be started.
FIRST_PHASE = "start: info"
# Progress of a rank with a position of an earlier call, or none.
NOT_BEGUN = (-1, 0)


class RankReport(NamedTuple):
    """Evidence about an unfinished rank; no snapshot if its node does not answer."""

    host: Host
    snapshot: ProcessSnapshot | None
    traces: Traces = Traces("", [])

    @property
    def position(self) -> Position | None:
        """Position, or None if unknown."""
        return None if self.snapshot is None else self.snapshot.position

    @property
    def state(self) -> str:
        """Letter of the process's state; "?" if unknown, "0" if not started."""
        if self.snapshot is None:
            return "?" if self.host.pid else "0"
        return self.snapshot.state


@dataclass(frozen=True)
class StallReport:
    """Report of a call that some ranks have not finished.

    Attributes:
        phase: the call, "rollout.reshard"; several methods are separated by commas.
        seen: the unfinished ranks.
        num_ranks: number of called ranks.
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
        parts = [place_in(self.phase, rank.position), _STATES.get(rank.state, "")]
        if rank.state in STOPPED:
            pid = rank.host.pid
            parts[1] += f"; kill -CONT {pid} resumes it"
        if rank.traces.device:
            parts.append(f"its device {rank.traces.device}")
        if rank.traces.frame:
            parts.append(rank.traces.frame)
        text = ", ".join(part for part in parts if part)
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
    if any(s.traces.frame for s in stall.seen):
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
