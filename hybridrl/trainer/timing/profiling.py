"""Chrome traces of trainer.profile_steps: one per rank, and one of the phases."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.controller.pool import Pool
from hybridrl.controller.spans import Span
from hybridrl.trainer.timing.phases import Phases, Timeline

log = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler:
    """Profiler of selected steps on all ranks; other steps cost nothing.

    Args:
        steps: counted from 1.
        pool: the ranks; each writes <run>/profile/step_<n>_rank<k>.json.gz where it runs.
        run_dir: of the run; the driver writes <run>/profile/phases_step_<n>.json.
        phases: holds the timeline of the finished step.
    """

    def __init__(self, steps: Sequence[int], pool: Pool, run_dir: Path, phases: Phases) -> None:
        self._steps = frozenset(steps)
        self._pool = pool
        self._folder = run_dir.resolve() / FOLDER
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
        others = f" to {files[-1].name}" if len(files) > 1 else ""
        log.info("traces of step %d: %s, %s%s", step, phases, files[0].name, others)


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
