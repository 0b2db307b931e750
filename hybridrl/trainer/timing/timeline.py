"""What a step's time went into: sections of the driver, work of the ranks, and what is left.

A rank is busy while it runs a worker's method, until its stream has drained; else it is idle:
while the driver rewards, schedules or logs, while data travels, while it waits in a phase for a
rank that takes longer. Waiting for others inside a collective counts as busy, because no process
can tell it from communication. docs/metrics.md says what each number means.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.controller.spans import Span

# Methods whose time a step is for: sampling, forwards and optimizer steps.
COMPUTE = frozenset({"generate", "compute_log_probs", "compute_values", "compute_scores", "update"})
# What is between the sections.
BETWEEN = "between"


@dataclass(frozen=True)
class Section:
    """A stretch of the driver's time and what the ranks did in it.

    Attributes:
        span: the driver's.
        ranks: for each rank, its worker calls.
    """

    span: Span
    ranks: list[list[Span]]

    def idle(self, rank: int) -> float:
        """Seconds in which a rank ran no worker call."""
        return self.span.seconds - _total(self.ranks[rank])

    def compute(self) -> float:
        """Seconds of the rank that took longest over the calls in COMPUTE."""
        return max(_total([span for span in spans if _computes(span)]) for spans in self.ranks)


@dataclass(frozen=True)
class Timeline:
    """One step: its span on the driver and its sections, which do not overlap."""

    step: Span
    sections: list[Section]

    @property
    def num_ranks(self) -> int:
        """Ranks that worked in it."""
        return max((len(section.ranks) for section in self.sections), default=0)

    def metrics(self) -> dict[str, float]:
        """Idle seconds by rank and by section, and the seconds outside the calls in COMPUTE.

        Returns:
            idle/rank<k>_s: seconds in which rank k ran no worker call; idle/mean_s and idle/max_s
            over ranks; idle/fraction: idle/mean_s as a share of the step. idle/<section>_s: mean
            over ranks of those in a section, `between` for none; they add up to idle/mean_s.
            time/outside_s: the step less what the slowest rank of each section spent in COMPUTE.
        """
        if not self.num_ranks:
            return {}
        between = self.step.seconds - sum(section.span.seconds for section in self.sections)
        per_rank = [
            between + sum(section.idle(rank) for section in self.sections)
            for rank in range(self.num_ranks)
        ]
        idle = {f"rank{rank}": seconds for rank, seconds in enumerate(per_rank)}
        idle |= {"mean": sum(per_rank) / self.num_ranks, "max": max(per_rank), BETWEEN: between}
        for section in self.sections:
            mean = sum(map(section.idle, range(self.num_ranks))) / self.num_ranks
            idle[section.span.name] = idle.get(section.span.name, 0.0) + mean
        outside = self.step.seconds - sum(section.compute() for section in self.sections)
        return {f"idle/{name}_s": seconds for name, seconds in idle.items()} | {
            "idle/fraction": idle["mean"] / self.step.seconds,
            "time/outside_s": outside,
        }


def write_trace(path: Path, timeline: Timeline, title: str) -> None:
    """Write a step in the Chrome trace format (Perfetto, chrome://tracing).

    One row for the driver's step and sections, one for each rank's worker calls. Times are
    relative to the step's begin; ranks of other nodes are placed by their own clocks.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    origin = timeline.step.start
    events = [_named("process_name", 0, title), _named("thread_name", 0, "driver")]
    events.append(_event(timeline.step, 0, origin))
    for rank in range(timeline.num_ranks):
        events.append(_named("thread_name", rank + 1, f"rank {rank}"))
    for section in timeline.sections:
        events.append(_event(section.span, 0, origin))
        for rank, spans in enumerate(section.ranks):
            events += [_event(span, rank + 1, origin) for span in spans]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "utf-8")


def _computes(span: Span) -> bool:
    return span.name.rpartition(".")[2] in COMPUTE


def _total(spans: Sequence[Span]) -> float:
    return sum(span.seconds for span in spans)


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    """What a row, or all of them together, is called."""
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _event(span: Span, row: int, origin: float) -> dict[str, Any]:
    """A span on a row; the format counts microseconds."""
    return {
        "ph": "X",
        "name": span.name,
        "pid": 0,
        "tid": row,
        "ts": 1e6 * (span.start - origin),
        "dur": 1e6 * span.seconds,
    }
