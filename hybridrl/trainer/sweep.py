"""The end of a sweep: one table of its jobs, ranked, with the failed ones in it.

Each job leaves `result.json` in its directory, so that jobs which a launcher ran in other
processes or on other machines are in the table, too.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

RESULT_FILE = "result.json"
SWEEP_FILE = "sweep.json"
# Written by Hydra when a sweep begins.
SWEEP_CONFIG = "multirun.yaml"


@dataclass(frozen=True)
class JobResult:
    """One job of a sweep.

    Attributes:
        job: its number in the sweep.
        overrides: as composed.
        status: ok | dry | failed.
        metric: what the sweep ranks by: the final eval/accuracy; None if there is none.
        seconds: wall time.
        directory: the job's run directory.
        error: why it failed, first line; empty otherwise.
    """

    job: int
    overrides: list[str]
    status: str
    metric: float | None
    seconds: float
    directory: str
    error: str = ""

    def write(self) -> None:
        """Leave result.json in the job's directory."""
        text = json.dumps(asdict(self), indent=1)
        (Path(self.directory) / RESULT_FILE).write_text(text + "\n")


class SweepTable(Callback):
    """Hydra callback: prints the ranked table and writes sweep.json when a sweep ends."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the time, to leave out what an earlier sweep left in the same directory."""
        self._started = time.time()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the results.

        Raises:
            SystemExit: 1, if a job failed: hydra.main itself reports no such thing.
        """
        directory = Path(config.hydra.sweep.dir)
        results = ranked(read_results(directory, since=self._started))
        text = json.dumps([asdict(result) for result in results], indent=1)
        (directory / SWEEP_FILE).write_text(text + "\n")
        # Not a terminal: wide enough that no cell is folded.
        console = Console()
        console = console if console.is_terminal else Console(width=200)
        console.print(sweep_table(results))
        console.print(f"Written to {directory / SWEEP_FILE}", markup=False)
        if any(result.status == "failed" for result in results):
            raise SystemExit(1)


def read_results(directory: Path, since: float) -> list[JobResult]:
    """The results below a sweep's directory that were written at or after `since` (time.time())."""
    # File times are coarser than the clock.
    files = [f for f in directory.rglob(RESULT_FILE) if f.stat().st_mtime >= since - 1]
    return [JobResult(**json.loads(file.read_text())) for file in files]


def ranked(results: list[JobResult]) -> list[JobResult]:
    """Highest metric first; jobs without one last, in their own order."""
    return sorted(
        results, key=lambda r: (r.metric is None, -(r.metric if r.metric is not None else 0), r.job)
    )


def sweep_table(results: list[JobResult]) -> Table:
    """The ranked results, each with the overrides in which the jobs differ."""
    common = set.intersection(*(set(r.overrides) for r in results)) if len(results) > 1 else set()
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


def finite(metric: float) -> float | None:
    """The metric, or None where there is none (NaN)."""
    return metric if math.isfinite(metric) else None
