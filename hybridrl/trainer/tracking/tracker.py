"""Metrics of each step: metrics.jsonl and the other trackers."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import RunConfig
from hybridrl.trainer.tracking.best_effort_files import AppendOnlyFile, replace_file
from hybridrl.trainer.tracking.sinks import TENSORBOARD, close_all, open_sinks

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

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

Row = dict[str, float | None]


class Tracker:
    """Store of every step's metrics.

    A resumed run begins with the steps `before` its checkpoint; later ones are removed.

    Attributes:
        rows: all steps so far, as in metrics.jsonl.

    Raises:
        OSError: metrics.jsonl cannot be written.
    """

    def __init__(self, run_dir: Path, config: RunConfig, before: Sequence[Row] = ()) -> None:
        self.rows: list[Row] = list(before)
        path, kept = run_dir / METRICS_FILE, b"".join(map(_line, before))
        if not (path.is_file() and path.read_bytes().startswith(kept)):
            replace_file(path, lambda new: new.write_bytes(kept))
        self._file = AppendOnlyFile(path, len(kept))
        self._sinks = open_sinks(config, run_dir, [_known(row) for row in before])

    def log(self, step: int, metrics: Mapping[str, float | None]) -> Row:
        """Write one step's metrics; non-finite numbers become null. Return the row.

        A row that cannot be written is written with a later one.
        """
        row: Row = {"step": step} | dict.fromkeys(PROMISED)
        for name, value in metrics.items():
            row[name] = float(value) if value is not None and math.isfinite(value) else None
        self.rows.append(row)
        had_room = not self._file.waiting
        self._file.append(_line(row))
        if had_room and self._file.waiting:
            reason = self._file.reason
            log.warning("%s cannot be written: %s; rows wait for room", METRICS_FILE, reason)
        for sink in self._sinks:
            sink.log(*_known(row))
        return row

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
        return self._file.waiting + sum(sink.failures for sink in self._sinks)

    def sync(self) -> None:
        """Fsync metrics.jsonl, except rows that wait for room."""
        self._file.sync()

    def failures(self) -> list[str]:
        """Describe each incomplete tracker in one line."""
        failures = []
        if waiting := self._file.waiting:
            rows = f"{waiting} row{'s' if waiting != 1 else ''} of {METRICS_FILE}"
            failures.append(f"{rows} could not be written: {self._file.reason}")
        for sink in self._sinks:
            if sink.failures:
                times = f"{sink.failures} time{'s' if sink.failures != 1 else ''}"
                failures.append(f"{sink.name} failed {times}: {sink.reason}")
        return failures

    def close(self, timeout_s: float = 20.0) -> None:
        """Flush and close; other trackers have `timeout_s` in all."""
        self._file.close()
        close_all(self._sinks, timeout_s)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl without an incomplete last line; empty if it does not exist.

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


def _line(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _known(row: Row) -> tuple[int, dict[str, float]]:
    """Split a row into its step and its finite metrics."""
    known = {name: value for name, value in row.items() if value is not None}
    return int(known.pop("step")), known
