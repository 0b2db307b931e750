"""Metrics and timeline of each step: JSON-lines files and the other trackers."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import RunConfig
from hybridrl.trainer.record import Row
from hybridrl.trainer.tracking.best_effort_files import JsonLines
from hybridrl.trainer.tracking.sinks import TENSORBOARD, close_all, open_sinks

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

METRICS_FILE, TIMELINE_FILE = "metrics.jsonl", "timeline.jsonl"
# Written after the end of a run.
REPORT_FILE = "report.html"

# Metrics of every row; null if a step has no such number.
PROMISED = (
    "reward/mean",
    "eval/accuracy",
    "eval/accuracy_greedy",
    "actor/first_log_ratio_max",
    "actor/kl",
    "rollout/log_prob_diff_mean",
    "rollout/tokens_per_second",
    "response/length_mean",
    "time/reshard_s",
    "time/rollout_s",
    "time/update_actor_s",
    "time/outside_s",
    "time/step_s",
    "idle/fraction",
    "mfu/old_log_probs",
    "mfu/update_actor",
)


class Tracker:
    """Store of every step's metrics, and of the timelines of recorded steps.

    A resumed run begins with the steps `before` its checkpoint; later ones are removed.

    Attributes:
        rows: all steps so far, as in metrics.jsonl.

    Raises:
        OSError: metrics.jsonl or timeline.jsonl cannot be written.
    """

    def __init__(self, run_dir: Path, config: RunConfig, before: Sequence[Row] = ()) -> None:
        self.rows: list[Row] = list(before)
        last = (before[-1]["step"] or 0) if before else -1
        earlier = [row for row in read_metrics(run_dir / TIMELINE_FILE) if row["step"] <= last]
        self._metrics = JsonLines(run_dir / METRICS_FILE, before)
        self._timeline = JsonLines(run_dir / TIMELINE_FILE, earlier)
        self._sinks = open_sinks(config, run_dir, [_known(row) for row in before])

    def log(self, step: int, metrics: Mapping[str, float | None]) -> Row:
        """Write one step's metrics; non-finite numbers become null. Return the row.

        A row that cannot be written is written with a later one.
        """
        row: Row = {"step": step} | dict.fromkeys(PROMISED)
        for name, value in metrics.items():
            row[name] = float(value) if value is not None and math.isfinite(value) else None
        self.rows.append(row)
        self._metrics.append(row)
        for sink in self._sinks:
            sink.log(*_known(row))
        return row

    def log_timeline(self, record: Mapping[str, Any]) -> None:
        """Write the timeline of a step, as a line of timeline.jsonl."""
        self._timeline.append(record)

    def show(self, name: str, step: int, what: "str | Tensor") -> None:
        """Show a text, in Markdown, or a histogram of values [N] in TensorBoard.

        It is written with the next step's metrics.
        """
        for sink in self._sinks:
            if sink.name == TENSORBOARD:
                sink.show(name, step, what)

    @property
    def lost(self) -> int:
        """Number of rows not on disk plus failed calls of other trackers."""
        waiting = self._metrics.waiting + self._timeline.waiting
        return waiting + sum(sink.failures for sink in self._sinks)

    def sync(self) -> None:
        """Fsync metrics.jsonl, except rows that wait for room."""
        self._metrics.sync()

    def failures(self) -> list[str]:
        """Describe each incomplete tracker in one line."""
        failures = [*self._metrics.lines(), *self._timeline.lines()]
        for sink in self._sinks:
            if sink.failures:
                times = f"{sink.failures} time{'s' if sink.failures != 1 else ''}"
                failures.append(f"{sink.name} failed {times}: {sink.reason}")
        return failures

    def close(self, timeout_s: float = 20.0) -> None:
        """Flush and close; other trackers have `timeout_s` in all."""
        self._metrics.close()
        self._timeline.close()
        close_all(self._sinks, timeout_s)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read such a file without an incomplete last line; empty if it does not exist.

    A power cut may damage lines that were not synced. Reading stops at the first of these, with a
    warning.
    """
    if not path.is_file():
        return []
    rows = []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            text = "%s: line %d of %d is damaged: it and later rows are ignored"
            log.warning(text, path, number, len(lines))
            break
    return rows


def _known(row: Row) -> tuple[int, dict[str, float]]:
    """Split a row into its step and its finite metrics."""
    known = {name: value for name, value in row.items() if value is not None}
    return int(known.pop("step")), known
