"""Wall time of each phase of a step, idle time of the ranks in it, and traces of a step.

A rank is busy while it runs a worker's method, until its stream is synchronized; else it is idle,
also while it waits for a straggler between calls. Waiting inside a collective counts as busy: it
cannot be distinguished from communication. docs/metrics.md defines each number.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridrl.controller.calls import Span, Stopwatch, TimedResult
from hybridrl.controller.pool import Pool

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
# Methods that count as computation: sampling, forward passes and optimizer steps.
COMPUTE = frozenset(
    {
        "generate",
        "generate_ahead",
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

    `beside` are ranks whose calls may begin in an earlier section than they end in: they only
    sample. There the driver's clock and theirs are compared.
    """

    step: Span
    sections: list[Section]
    beside: range = range(0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max((len(section.ranks) for section in self.sections), default=0)

    def idle(self, section: Section, rank: int) -> float:
        """Compute the seconds of a section in which a rank ran no worker call."""
        return section.span.seconds - _total(self._within(section.span, rank, section.ranks))

    def compute(self, section: Section) -> float:
        """Compute the seconds of the calls in COMPUTE on the slowest rank of a section."""
        return max(
            _total(
                span
                for span in self._within(section.span, rank, section.ranks)
                if _method(span) in COMPUTE
            )
            for rank in range(self.num_ranks)
        )

    def _within(
        self, window: Span, rank: int, own: Sequence[Sequence[Span]] | None = None
    ) -> list[Span]:
        """Return a rank's calls in a window: those of `own`, or all of the step.

        Of a rank in `beside`, the parts of all its calls that are in the window.
        """
        spans = [span for section in self.sections for span in section.ranks[rank]]
        if rank in self.beside:
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
        per_rank = [self.step.seconds - _total(self._within(self.step, rank)) for rank in ranks]
        idle = {f"rank{rank}": seconds for rank, seconds in enumerate(per_rank)}
        idle |= {"mean": fmean(per_rank), "max": max(per_rank), "between": fmean(per_rank)}
        if self.beside:
            idle["engines"] = fmean(per_rank[rank] for rank in self.beside)
            idle["trainers"] = fmean(per_rank[rank] for rank in ranks if rank not in self.beside)
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
            **({"beside": list(self.beside)} if self.beside else {}),
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


class Phases:
    """Wall seconds of a step's phases on the driver's clock, with the ranks' calls in them.

    Args:
        take_spans: returns the ranks' calls since the last time (`SpanLog.take`).
        on_enter: called with the name of each phase at its beginning.
        beside: see `Timeline`.

    Attributes:
        timeline: the last whole step.
        switch_s: seconds from a rank's last update to its sampling in the last section, maximum
            over ranks by their own clocks; None if no rank sampled there after an update.
    """

    timeline: Timeline
    switch_s: float | None = None

    def __init__(
        self,
        take_spans: Callable[[], list[list[Span]]],
        on_enter: Callable[[str], None] = lambda name: None,
        beside: range = range(0),
    ) -> None:
        self._beside = beside
        self._take_spans = take_spans
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}
        self._sections: list[Section] = []
        self._updated: dict[int, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step; clear the phases of the step before."""
        self._seconds, self._sections = {}, []
        self._take_spans()  # of work between steps
        with Stopwatch("step") as watch:
            yield
        self.timeline = Timeline(watch.span, self._sections, self._beside)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a phase; repetitions within a step are summed."""
        self._on_enter(name)
        with Stopwatch(name) as watch:
            yield
        self._sections.append(Section(watch.span, self._take_spans()))
        self.switch_s = self._switch_s(self._sections[-1])
        self._seconds[name] = self.seconds(name) + watch.span.seconds

    def _switch_s(self, section: Section) -> float | None:
        switches = []
        for rank, spans in enumerate(section.ranks):
            for span in spans:
                if _method(span) == "update":
                    self._updated[rank] = span.start + span.seconds
                elif _method(span) == "generate" and rank in self._updated:
                    switches.append(span.start - self._updated.pop(rank))
        return max(switches, default=None)

    def split(self, name: str, calls: Mapping[str, TimedResult]) -> None:
        """Count calls in a finished phase, on their slowest ranks, as separate phases."""
        for part, call in calls.items():
            self._seconds[part] = self.seconds(part) + call.span.seconds
        rest = self.seconds(name) - _total(call.span for call in calls.values())
        self._seconds[name] = max(0.0, rest)

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase in this step so far; 0 if it has not run."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float | None]:
        """Compute time/<phase>_s, time/step_s and `Timeline.metrics` of the finished step."""
        seconds = self._seconds | {"step": self.timeline.step.seconds}
        return {**{f"time/{name}_s": s for name, s in seconds.items()}, **self.timeline.metrics()}


class StepProfiler:
    """Profiler of selected steps on all ranks; other steps cost nothing.

    Each rank writes <run>/profile/step_<n>_rank<k>.json.gz where it runs, the driver
    <run>/profile/phases_step_<n>.json.
    """

    def __init__(self, steps: Sequence[int], pool: Pool, run_dir: Path, phases: Phases) -> None:
        self._steps = frozenset(steps)
        self._pool = pool
        self._folder = run_dir.resolve() / PROFILE_FOLDER
        self._phases = phases

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile a whole step, without the start and the writing of the traces."""
        if step not in self._steps:
            yield
            return
        ranks = range(self._pool.size)
        self._pool.run("start_profile", [()] * len(ranks), f"profile step {step}")
        yield
        files = [self._folder / f"step_{step}_rank{rank}.json.gz" for rank in ranks]
        self._pool.run("write_profile", [(str(file),) for file in files], f"profile step {step}")
        phases = self._folder / f"phases_step_{step}.json"
        try:
            write_trace(phases, self._phases.timeline, f"step {step}")
        except OSError as error:
            log.warning("%s could not be written: %s; the run goes on", phases, error)
        log.info("traces of step %d: %s, %s", step, phases, files[0].parent / f"step_{step}_rank*")


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


class GraceCheck:
    """Warning, once, if SIGTERM would end the run without a checkpoint.

    The running phase ends before the checkpoint is written. `grace_s` is checkpoint.on_sigterm;
    0: no checkpoint is expected.
    """

    def __init__(self, grace_s: float, warn: Callable[[str], None]) -> None:
        self._grace_s = grace_s
        self._warn = warn

    def look(self, timeline: Timeline, write_s: float | None) -> None:
        """Compare a step's longest phase plus the writing of the last checkpoint with the grace."""
        if not self._grace_s or write_s is None or not timeline.sections:
            return
        phase = max((section.span for section in timeline.sections), key=lambda span: span.seconds)
        if phase.seconds + write_s <= self._grace_s:
            return
        self._warn(
            f"SIGTERM may end this run without a checkpoint: {phase.name} took "
            f"{phase.seconds:.1f} s and writing one {write_s:.1f} s, and checkpoint.on_sigterm is "
            f"{self._grace_s:g} s. Raise it, and the time between SIGTERM and SIGKILL of your "
            "scheduler."
        )
        self._grace_s = 0.0  # no second warning


def clipped(span: Span, window: Span) -> Span:
    """Return the part of a span inside a window, perhaps of 0 seconds."""
    start = max(span.start, window.start)
    end = min(span.start + span.seconds, window.start + window.seconds)
    return Span(span.name, start, max(0.0, end - start))


def _method(span: Span) -> str:
    return span.name.rpartition(".")[2]


def _total(spans: Iterable[Span]) -> float:
    return sum(span.seconds for span in spans)
