"""Results of a sweep: a ranked table of its jobs, failed ones included.

Each job writes `result.json` to its directory, so that jobs of other processes and machines are in
the table, too. A job without the file has failed.
"""

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybridrl.app.runs import RESULT_FILE, accuracy_text, progress
from hybridrl.trainer.tracking.best_effort_files import replace_text

log = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"
# Written by Hydra at the start of a sweep.
SWEEP_CONFIG = "multirun.yaml"
# Written by Hydra into a job's directory at its start.
JOB_OVERRIDES = ".hydra/overrides.yaml"
# Result of a job that has not begun, in a folder with an earlier run.
NOT_BEGUN_FILE = "not_begun.json"
# Number of a job with an unknown number.
UNKNOWN_JOB = -1

# A number with a decimal point, in the value of an override.
_LONG_NUMBER = re.compile(r"(?<![\w.-])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])")


@dataclass(frozen=True)
class JobResult:
    """How a run, or a job of a sweep, ended.

    Attributes:
        overrides: as composed; empty without a readable result.
        status: ok | dry | failed | stopped (by a signal).
        metric: final eval/accuracy, by which jobs are ranked; None if there is none.
        error: first line of the reason of a failure; else empty.
        ci95: half-width of the metric's 95 % interval.
        reward, kl: reward/mean and actor/kl of the last step.
    """

    job: int
    overrides: list[str]
    status: str
    metric: float | None
    seconds: float
    directory: str
    error: str = ""
    ci95: float | None = None
    reward: float | None = None
    kl: float | None = None

    def write(self, name: str = RESULT_FILE) -> None:
        """Write a file, result.json with the run's last metrics, to its directory.

        Logs a disk error.
        """
        path = Path(self.directory) / name
        known, numbers = progress(path.parent), {}
        if name == RESULT_FILE and known.step is not None:
            numbers = {"ci95": known.ci95, "reward": known.reward, "kl": known.kl}
        try:
            _write(path, asdict(self) | numbers)
        except OSError as error:
            log.error("%s could not be written: %s; a sweep counts it as failed", path, error)


def show_results(directory: Path | None, results: list[JobResult]) -> None:
    """Print the table of a sweep, and write sweep.json to its directory if that is kept."""
    results = ranked(results)
    # Without a terminal: wide enough for all cells.
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(sweep_table(results))
    if directory is None:
        return
    path = directory / SWEEP_FILE
    try:
        _write(path, [asdict(result) for result in results])
        console.print(f"Written to {path}", markup=False)
    except OSError as error:
        console.print(f"{path} could not be written: {error}", markup=False)


def read_results(directory: Path, since: float) -> list[JobResult]:
    """Return the results of jobs below a sweep's directory, not older than `since` (time.time()).

    A job without a readable result has failed.
    """
    names = (RESULT_FILE, NOT_BEGUN_FILE)
    files = [file for name in names for file in _written(directory.rglob(name), since)]
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
        return _failed(file.parent, f"{file.name} cannot be read: {error}")


def _failed(folder: Path, reason: str) -> JobResult:
    """Return the result of a job without a readable result."""
    job = int(folder.name) if folder.name.isdigit() else UNKNOWN_JOB
    return JobResult(job, [], "failed", None, 0.0, str(folder), reason)


def _write(path: Path, value: Any) -> None:
    replace_text(path, json.dumps(value, indent=1) + "\n")


def ranked(results: list[JobResult]) -> list[JobResult]:
    """Sort by metric, highest first; jobs without one last, in their order."""
    return sorted(results, key=lambda r: (r.metric is None, -(r.metric or 0.0), r.job))


def is_within_noise(best: JobResult, other: JobResult) -> bool:
    """Return whether two accuracies differ by no more than the 95 % interval of the difference.

    The half-widths add up as of independent samples. Jobs share their held-out problems, which
    makes the difference more certain than that.
    """
    if best.metric is None or best.ci95 is None or other.metric is None or other.ci95 is None:
        return False
    return abs(best.metric - other.metric) <= math.hypot(best.ci95, other.ci95)


def sweep_table(results: list[JobResult]) -> Table:
    """Return a table of ranked results with the overrides in which jobs differ.

    Their numbers have three significant digits, unless that would make two jobs look the same.
    All jobs within noise of the best have rank 1.
    """
    known = [set(r.overrides) for r in results if r.overrides]
    common = set.intersection(*known) if len(known) > 1 else set()
    table = Table(title="Sweep, best first", title_justify="left", caption_justify="left")
    names = ("rank", "job", "overrides", "held-out accuracy", "reward", "KL", "minutes", "status")
    for name in names:
        table.add_column(name, overflow="fold")
    # Hydra writes a file's name as `my_reward.py\:score`.
    own = [" ".join(o for o in r.overrides if o not in common).replace("\\:", ":") for r in results]
    short = [_LONG_NUMBER.sub(lambda number: f"{float(number[0]):.3g}", text) for text in own]
    if len({*short}) == len({*own}):
        own = short
    alike = [result for result in results[1:] if is_within_noise(results[0], result)]
    for rank, result in enumerate(results, start=1):
        status = result.status + (f": {result.error}" if result.error else "")
        table.add_row(
            "-" if result.metric is None else "1" if result in alike else str(rank),
            str(result.job),
            escape(own[rank - 1]),
            accuracy_text(result.metric, result.ci95),
            "-" if result.reward is None else f"{result.reward:.3f}",
            "-" if result.kl is None else f"{result.kl:.4f}",
            f"{result.seconds / 60:.1f}",
            escape(status),
        )
    if alike:
        table.caption = (
            f"Rank 1: {len(alike) + 1} jobs within noise of the best: their held-out accuracies do "
            f"not differ at 95 %. More problems (data.num_eval_problems) may tell them apart."
        )
    return table
