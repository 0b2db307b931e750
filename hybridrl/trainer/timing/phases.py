"""Wall time of each phase of a step, and profiles of steps; idle time is in timeline.py."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridrl.controller.calls import Span, Stopwatch, TimedResult
from hybridrl.controller.pool import Pool
from hybridrl.trainer.record import Observer, StepRecord
from hybridrl.trainer.timing.timeline import Section, Timeline, method_of, total, write_trace

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class Phases:
    """Wall seconds of a step's phases on the driver's clock, with the ranks' calls in them.

    Args:
        take_spans: returns the ranks' calls since the last time (`SpanLog.take`).
        on_enter: called with the name of each phase at its beginning.
        sampling_ranks: see `Timeline`.

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
        sampling_ranks: range = range(0),
    ) -> None:
        self._sampling_ranks = sampling_ranks
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
        self.timeline = Timeline(watch.span, self._sections, self._sampling_ranks)

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
                if method_of(span) == "update":
                    self._updated[rank] = span.start + span.seconds
                elif method_of(span) == "generate" and rank in self._updated:
                    switches.append(span.start - self._updated.pop(rank))
        return max(switches, default=None)

    def split(self, name: str, calls: Mapping[str, TimedResult]) -> None:
        """Count calls in a finished phase, on their slowest ranks, as separate phases."""
        for part, call in calls.items():
            self._seconds[part] = self.seconds(part) + call.span.seconds
        rest = self.seconds(name) - total(call.span for call in calls.values())
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


class GraceCheck(Observer):
    """Warning, once, if SIGTERM would end the run without a checkpoint.

    The running phase ends before the checkpoint is written. `grace_s` is checkpoint.on_sigterm;
    0: no checkpoint is expected. `write_s` returns the seconds that the last checkpoint took.
    """

    def __init__(
        self, grace_s: float, warn: Callable[[str], None], write_s: Callable[[], float | None]
    ) -> None:
        self._grace_s = grace_s
        self._warn = warn
        self._write_s = write_s

    def after(self, record: StepRecord) -> StepRecord:
        """Compare the step's longest phase plus the writing of a checkpoint with the grace."""
        write_s, sections = self._write_s(), record.timeline.sections
        if not self._grace_s or write_s is None or not sections:
            return record
        phase = max((section.span for section in sections), key=lambda span: span.seconds)
        if phase.seconds + write_s > self._grace_s:
            self._warn(
                f"SIGTERM may end this run without a checkpoint: {phase.name} took "
                f"{phase.seconds:.1f} s and writing one {write_s:.1f} s, and "
                f"checkpoint.on_sigterm is {self._grace_s:g} s. Raise it, and the time between "
                "SIGTERM and SIGKILL of your scheduler."
            )
            self._grace_s = 0.0  # no second warning
        return record
