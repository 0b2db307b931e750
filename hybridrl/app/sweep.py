"""Results of a sweep: a ranked table of its jobs, failed ones included.

Each job writes `result.json` to its directory, so that jobs of other processes and machines are in
the table, too. A job without the file has failed.
"""

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybridrl.trainer.tracking.best_effort_files import replace_file

log = logging.getLogger(__name__)

RESULT_FILE = "result.json"
SWEEP_FILE = "sweep.json"
# Written by Hydra at the start of a sweep.
SWEEP_CONFIG = "multirun.yaml"
# Written by Hydra into a job's directory at its start.
JOB_OVERRIDES = ".hydra/overrides.yaml"
# Number of a job with an unknown number.
UNKNOWN_JOB = -1


@dataclass(frozen=True)
class JobResult:
    """One job of a sweep.

    Attributes:
        overrides: as composed; empty without a readable result.
        status: ok | dry | failed.
        metric: final eval/accuracy, by which jobs are ranked; None if there is none.
        error: first line of the reason of a failure; else empty.
    """

    job: int
    overrides: list[str]
    status: str
    metric: float | None
    seconds: float
    directory: str
    error: str = ""

    def write(self) -> None:
        """Write result.json to the job's directory; a disk error is only logged."""
        path = Path(self.directory) / RESULT_FILE
        try:
            _write_json(path, asdict(self))
        except OSError as error:
            log.error("%s could not be written: %s; the sweep counts it as failed", path, error)


class SweepTable(Callback):
    """Hydra callback: prints the ranked table and writes sweep.json when a sweep ends."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Record the time, to skip results of an earlier sweep in the same directory."""
        self._started = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the results; exits with 1 if a job failed, which hydra.main does not report."""
        directory = Path(config.hydra.sweep.dir)
        results = ranked(read_results(directory, since=self._started))
        # Without a terminal: wide enough for all cells.
        console = Console()
        console = console if console.is_terminal else Console(width=200)
        console.print(sweep_table(results))
        path = directory / SWEEP_FILE
        try:
            _write_json(path, [asdict(result) for result in results])
            console.print(f"Written to {path}", markup=False)
        except OSError as error:
            console.print(f"{path} could not be written: {error}", markup=False)
        if any(result.status == "failed" for result in results):
            raise SystemExit(1)


def read_results(directory: Path, since: float) -> list[JobResult]:
    """Return the results of jobs below a sweep's directory, not older than `since` (time.time()).

    A job without a readable result has failed.
    """
    files = _written(directory.rglob(RESULT_FILE), since)
    jobs = {file.parent.parent for file in _written(directory.rglob(JOB_OVERRIDES), since)}
    # A full disk may leave only the folder, and hydra.output_subdir moves the overrides.
    numbered = (path for path in directory.glob("*") if path.name.isdigit())
    jobs |= {*_written(numbered, since)}
    lost = jobs - {file.parent for file in files}
    return [_read(file) for file in files] + [
        _failed(folder, f"left no {RESULT_FILE} in {folder.relative_to(directory)}")
        for folder in sorted(lost)
    ]


def _written(paths: Iterable[Path], since: float) -> list[Path]:
    # File times are coarser than the clock.
    return [path for path in paths if path.stat().st_mtime >= since - 1]


def _read(file: Path) -> JobResult:
    try:
        return JobResult(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        return _failed(file.parent, f"{RESULT_FILE} cannot be read: {error}")


def _failed(folder: Path, reason: str) -> JobResult:
    """Return the result of a job without a readable result."""
    job = int(folder.name) if folder.name.isdigit() else UNKNOWN_JOB
    return JobResult(job, [], "failed", None, 0.0, str(folder), reason)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1) + "\n"
    replace_file(path, lambda new: new.write_text(text))


def ranked(results: list[JobResult]) -> list[JobResult]:
    """Sort by metric, highest first; jobs without one last, in their order."""
    return sorted(results, key=lambda r: (r.metric is None, -(r.metric or 0.0), r.job))


def sweep_table(results: list[JobResult]) -> Table:
    """Return a table of the results with the overrides in which jobs differ."""
    known = [set(r.overrides) for r in results if r.overrides]
    common = set.intersection(*known) if len(known) > 1 else set()
    table = Table(title="Sweep, best first", title_justify="left")
    for name in ("rank", "job", "overrides", "eval/accuracy", "minutes", "status"):
        table.add_column(name)
    for rank, result in enumerate(results, start=1):
        own = " ".join(o for o in result.overrides if o not in common)
        status = result.status + (f": {result.error}" if result.error else "")
        table.add_row(
            str(rank) if result.metric is not None else "-",
            str(result.job),
            escape(own),
            "-" if result.metric is None else f"{result.metric:.4f}",
            f"{result.seconds / 60:.1f}",
            escape(status),
        )
    return table
