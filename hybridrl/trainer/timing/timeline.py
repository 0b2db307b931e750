"""Timeline of a step: idle time of the ranks by section, and a trace of it.

A rank is busy while it runs a worker's method, until its stream is synchronized. Else it is idle,
also while it waits for a straggler between calls. Waiting inside a collective counts as busy: it
cannot be distinguished from communication. docs/metrics.md defines each number.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridrl.controller.calls import Span

# Methods that count as computation: sampling, forward passes and optimizer steps.
COMPUTE = frozenset(
    {
        "generate",
        "generate_ahead",
        "serve",
        "compute_log_probs",
        "compute_values",
        "compute_scores",
        "update",
    }
)


@dataclass(frozen=True)
class Section:
    """Section of the driver's time, with the worker calls of each rank that ended in it."""

    span: Span
    ranks: list[list[Span]]


@dataclass(frozen=True)
class Timeline:
    """Timeline of a step: its span on the driver and its disjoint sections.

    Calls of `sampling_ranks`, which only sample, may begin in an earlier section than they end in.
    There the driver's clock and theirs are compared.
    """

    step: Span
    sections: list[Section]
    sampling_ranks: range = range(0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max((len(section.ranks) for section in self.sections), default=0)

    def idle(self, section: Section, rank: int) -> float:
        """Compute the seconds of a section in which a rank ran no worker call."""
        return section.span.seconds - total(self._within(section.span, rank, section.ranks))

    def compute(self, section: Section) -> float:
        """Compute the seconds of the calls in COMPUTE on the slowest rank of a section."""
        return max(
            total(
                span
                for span in self._within(section.span, rank, section.ranks)
                if method_of(span) in COMPUTE
            )
            for rank in range(self.num_ranks)
        )

    def _within(
        self, window: Span, rank: int, own: Sequence[Sequence[Span]] | None = None
    ) -> list[Span]:
        """Return a rank's calls in a window: those of `own`, or all of the step.

        Of a rank in `sampling_ranks`, the parts of all its calls that are in the window.
        """
        spans = [span for section in self.sections for span in section.ranks[rank]]
        if rank in self.sampling_ranks:
            return [clipped(span, window) for span in spans]
        return spans if own is None else list(own[rank])

    def metrics(self) -> dict[str, float]:
        """Compute idle seconds by rank and section, and seconds outside the calls in COMPUTE.

        Returns:
            idle/rank<k>_s: seconds in which rank k ran no worker call; idle/mean_s and idle/max_s
            over ranks; idle/fraction: idle/mean_s as a share of the step. idle/<section>_s: mean
            over ranks of those in a section, `between` for none; they add up to idle/mean_s.
            With ranks that only sample idle/engines_s, their mean, and idle/trainers_s of others.
            time/outside_s: the step less what the slowest rank of each section spent in COMPUTE.
        """
        if not self.num_ranks:
            return {}
        ranks = range(self.num_ranks)
        per_rank = [self.step.seconds - total(self._within(self.step, rank)) for rank in ranks]
        idle = {f"rank{rank}": seconds for rank, seconds in enumerate(per_rank)}
        idle |= {"mean": fmean(per_rank), "max": max(per_rank), "between": fmean(per_rank)}
        if self.sampling_ranks:
            idle["engines"] = fmean(per_rank[rank] for rank in self.sampling_ranks)
            idle["trainers"] = fmean(
                per_rank[rank] for rank in ranks if rank not in self.sampling_ranks
            )
        for section in self.sections:
            mean = fmean(self.idle(section, rank) for rank in ranks)
            idle["between"] -= mean
            idle[section.span.name] = idle.get(section.span.name, 0.0) + mean
        outside = self.step.seconds - sum(map(self.compute, self.sections))
        return {f"idle/{name}_s": seconds for name, seconds in idle.items()} | {
            "idle/fraction": idle["mean"] / self.step.seconds,
            "time/outside_s": outside,
        }

    def record(self, step: int) -> dict[str, Any]:
        """Return the step as a line of timeline.jsonl: starts since its begin, seconds.

        Ranks of other nodes use their own clocks.
        """

        def times(span: Span) -> dict[str, float]:
            start = span.start - self.step.start
            return {"start": round(start, 6), "seconds": round(span.seconds, 6)}

        return {
            "step": step,
            "seconds": round(self.step.seconds, 6),
            "num_ranks": self.num_ranks,
            **({"beside": list(self.sampling_ranks)} if self.sampling_ranks else {}),
            "sections": [
                {
                    "name": section.span.name,
                    **times(section.span),
                    "ranks": [
                        [{"method": span.name, **times(span)} for span in spans]
                        for spans in section.ranks
                    ],
                }
                for section in self.sections
            ],
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


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    """Build the name event of a row, or of the process."""
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _event(span: Span, row: int, origin: float) -> dict[str, Any]:
    """Build the event of a span; the format's unit is microseconds."""
    times = {"ts": 1e6 * (span.start - origin), "dur": 1e6 * span.seconds}
    return {"ph": "X", "name": span.name, "pid": 0, "tid": row, **times}


def clipped(span: Span, window: Span) -> Span:
    """Return the part of a span inside a window, perhaps of 0 seconds."""
    start = max(span.start, window.start)
    end = min(span.start + span.seconds, window.start + window.seconds)
    return Span(span.name, start, max(0.0, end - start))


def method_of(span: Span) -> str:
    """Return the method of a worker call."""
    return span.name.rpartition(".")[2]


def total(spans: Iterable[Span]) -> float:
    """Return the seconds of all spans together."""
    return sum(span.seconds for span in spans)
