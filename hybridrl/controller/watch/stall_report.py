"""Which rank holds the others up, and how to say it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridrl.controller.watch.flight_recorder import NCCL_PREFIX
from hybridrl.controller.watch.process_snapshot import GONE, STOPPED, ProcessSnapshot, Traces
from hybridrl.controller.watch.waiting import Host
from hybridrl.distributed.position import Position

# Ranks that a report describes one by one.
MAX_DESCRIBED = 8
IN_KERNEL = "D"
# Here processes have no ranks yet, and some may not have been started.
FIRST_PHASE = "start: info"
# Not begun: an earlier call's place, or none.
NOT_BEGUN = (-1, 0)


class RankReport(NamedTuple):
    """What was seen of a rank that has not answered.

    Attributes:
        host: the rank.
        glimpse: where it is; None if its node does not answer.
        traces: what it wrote when asked.
    """

    host: Host
    glimpse: ProcessSnapshot | None
    traces: Traces = Traces("", [])

    @property
    def position(self) -> Position | None:
        """Where it is, if that is known."""
        return None if self.glimpse is None else self.glimpse.position

    @property
    def state(self) -> str:
        """The letter of its process's state; "?" or "0" if it is not known."""
        if self.glimpse is None:
            return "?" if self.host.pid else "0"
        return self.glimpse.state


@dataclass(frozen=True)
class StallReport:
    """A call that not all ranks have answered.

    Attributes:
        phase: the call, "rollout.reshard"; of several methods, in their order, with commas.
        seen: the ranks that have not answered.
        num_ranks: all that were called.
    """

    phase: str
    seen: Sequence[RankReport]
    num_ranks: int

    def progress(self, sighting: RankReport) -> tuple[int, int] | None:
        """How far a rank is in the call, in order; None where that is not known."""
        position, phases = sighting.position, self.phase.split(", ")
        if position is None:
            return None
        if position.is_idle or position.phase not in phases:
            return NOT_BEGUN
        return phases.index(position.phase), position.steps

    def suspects(self) -> list[RankReport]:
        """The ranks for which the others wait; none where they are all alike.

        Processes that cannot run come first: stopped or gone. Else those that are behind; else
        those whose devices are; and else those that wait in the kernel.
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
        """Suspects first, then the others by rank."""
        suspects = self.suspects()
        return suspects + [s for s in self.seen if s not in suspects]

    def who_is_where(self) -> str:
        """All ranks on one line: "rank 3 is in bucket 17 of 24, ranks 0-2 are in bucket 18"."""
        groups: dict[str, list[RankReport]] = {}
        for sighting in sorted(self.seen, key=lambda s: self.progress(s) or NOT_BEGUN):
            groups.setdefault(self.place(sighting.position), []).append(sighting)
        texts = []
        for place, members in groups.items():
            texts.append(f"{ranks([s.host.rank for s in members], 'is', 'are')} {place}")
        finished = self.num_ranks - len(self.seen)
        if finished:
            texts.append(f"{finished} other{'s have' if finished > 1 else ' has'} finished")
        return ", ".join(texts)

    def place(self, position: Position | None) -> str:
        """In words that follow "is": "in bucket 17 of 24", "idle after rollout.generate"."""
        if position is None:
            return "nowhere yet" if self.phase == FIRST_PHASE else "at an unknown place"
        if position.is_idle:
            return f"idle after {position.phase}" if position.phase else "idle"
        if position.phase == self.phase:
            return position.within()
        return f"in {position.phase}, {position.within()}"

    def describe(self, sighting: RankReport) -> str:
        """One rank: node and process, place, state, innermost line, log file."""
        parts = [self.place(sighting.position), _STATES.get(sighting.state, "")]
        if sighting.state in STOPPED:
            pid = sighting.host.pid
            parts[1] += f"; kill -CONT {pid} lets it go on"
        if sighting.traces.device:
            parts.append(f"its device {sighting.traces.device}")
        if sighting.traces.frame:
            parts.append(sighting.traces.frame)
        told = ", ".join(part for part in parts if part)
        return f"  {sighting.host.describe()}: {told}\n    {sighting.host.log_file}"


_STATES = {
    "": "its process is gone",
    "T": "stopped by a signal, as by kill -STOP, Ctrl-Z or a scheduler that suspends jobs",
    "t": "stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "in an uninterruptible wait of the kernel, as for a file system that does not answer",
    "?": "its node does not answer",
    "0": "Ray has not started it",
}


def report(scene: StallReport, finding: str, advice: str) -> str:
    """The whole story of a call that does not end.

    Args:
        scene: who is where, with traces.
        finding: what was found, "nobody has got further in rollout.reshard for 600 s".
        advice: what to do if nothing is wrong.
    """
    ordered = scene.in_order()
    lines = [f"{finding}: {scene.who_is_where()}."]
    lines += [scene.describe(sighting) for sighting in ordered[:MAX_DESCRIBED]]
    if len(ordered) > MAX_DESCRIBED:
        lines.append(f"  and {len(ordered) - MAX_DESCRIBED} more")
    if any(s.traces.frame for s in scene.seen):
        lines.append("The stacks of their threads are at the end of their logs.")
    if scene.phase == FIRST_PHASE:
        lines.append("Processes get their ranks later; here they are numbered as they were made.")
    lines += _about_records(path for s in scene.seen for path in s.traces.records)
    return "\n".join([*lines, advice])


def _about_records(paths: Iterable[str]) -> list[str]:
    """Where the flight recorders wrote, and what reads it."""
    files = [Path(path) for path in paths]
    folders = sorted({str(path.parent) for path in files})
    told = [f"Their last collectives are in {folder}/*_trace_rank_*." for folder in folders]
    for folder in sorted({str(f.parent) for f in files if f.name.startswith(NCCL_PREFIX)}):
        program = "torchfrtrace --allow-incomplete-ranks --prefix"
        told.append(f"To compare NCCL's: {program} {NCCL_PREFIX} {folder}")
    return told


def ranks(numbers: Sequence[int], verb: str, verbs: str) -> str:
    """ "rank 3 is", "ranks 0-2 and 5 are"."""
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
