"""Timeline of a step: sections of the driver, calls of the ranks, idle time.

A rank is busy while it runs a worker's method, until its stream is synchronized; else it is idle,
also while it waits for a straggler between calls. Waiting inside a collective counts as busy: it
cannot be distinguished from communication. docs/metrics.md defines each number.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.controller.calls import Span

# Methods that count as computation: sampling, forward passes and optimizer steps.
COMPUTE = frozenset({"generate", "compute_log_probs", "compute_values", "compute_scores", "update"})
# Name of the time between sections.
BETWEEN = "between"


@dataclass(frozen=True)
class Section:
    """Section of the driver's time, with the ranks' worker calls.

    Attributes:
        span: of the driver.
        ranks: worker calls of each rank.
    """

    span: Span
    ranks: list[list[Span]]

    def idle(self, rank: int) -> float:
        """Compute the seconds in which a rank ran no worker call."""
        return self.span.seconds - _total(self.ranks[rank])

    def compute(self) -> float:
        """Compute the seconds of the calls in COMPUTE on the slowest rank."""
        return max(_total([span for span in spans if _computes(span)]) for spans in self.ranks)


@dataclass(frozen=True)
class Timeline:
    """Timeline of a step: its span on the driver and its disjoint sections."""

    step: Span
    sections: list[Section]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max((len(section.ranks) for section in self.sections), default=0)

    def metrics(self) -> dict[str, float]:
        """Compute idle seconds by rank and section, and seconds outside the calls in COMPUTE.

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

    It has one row for the driver's step and sections, and one for each rank's worker calls. Times
    are relative to the step's begin; ranks of other nodes use their own clocks.

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
    """Build the name event of a row, or of the process."""
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _event(span: Span, row: int, origin: float) -> dict[str, Any]:
    """Build the event of a span; the format's unit is microseconds."""
    return {
        "ph": "X",
        "name": span.name,
        "pid": 0,
        "tid": row,
        "ts": 1e6 * (span.start - origin),
        "dur": 1e6 * span.seconds,
    }
