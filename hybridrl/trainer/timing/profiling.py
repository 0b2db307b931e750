"""Chrome traces of trainer.profile_steps: one per rank, and one of the phases."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridrl.controller.pool import Pool
from hybridrl.trainer.timing.timeline import Timeline, write_trace

log = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler:
    """Profiler of selected steps on all ranks; other steps cost nothing.

    Args:
        steps: counted from 1.
        pool: the ranks; each writes <run>/profile/step_<n>_rank<k>.json.gz where it runs.
        run_dir: of the run; the driver writes <run>/profile/phases_step_<n>.json.
        timeline: returns that of the finished step.
    """

    def __init__(
        self,
        steps: Sequence[int],
        pool: Pool,
        run_dir: Path,
        timeline: Callable[[], Timeline],
    ) -> None:
        self._steps = frozenset(steps)
        self._pool = pool
        self._folder = run_dir.resolve() / FOLDER
        self._timeline = timeline

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
            write_trace(phases, self._timeline(), f"step {step}")
        except OSError as error:
            log.warning("%s could not be written: %s; the run goes on", phases, error)
        others = f" to {files[-1].name}" if len(files) > 1 else ""
        log.info("traces of step %d: %s, %s%s", step, phases, files[0].name, others)
