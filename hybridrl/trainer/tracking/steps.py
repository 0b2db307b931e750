"""Text of a step: a row below titles, or one plain line; the time left."""

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hybridrl.trainer.tracking.header import count_text
from hybridrl.trainer.tracking.summary import Metrics, duration_text, phases_text


class Column(NamedTuple):
    """Column of the table: one metric of a step, in `width` characters.

    It is shown on terminals of `min_terminal` characters and more, and in each plain line.
    """

    title: str
    metric: str
    show: Callable[[float], str]
    width: int
    min_terminal: int = 0


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 5e-5 else f"{value:.0e}"


COLUMNS = (
    Column("step", "step", "{:.0f}".format, 5),
    Column("reward", "reward/mean", "{:.3f}".format, 7),
    Column("held-out", "eval/accuracy", "{:.3f}".format, 9),
    Column("greedy", "eval/accuracy_greedy", "{:.3f}".format, 7, 100),
    Column("KL", "actor/kl", _kl, 8),
    Column("max ratio", "actor/log_ratio_max", lambda x: f"{math.exp(min(x, 50.0)):.2f}", 9),
    Column("length", "response/length_mean", "{:.1f}".format, 7),
    Column("cut off", "response/truncated_fraction", "{:.1%}".format, 8, 100),
    Column("tok/s", "rollout/tokens_per_second", count_text, 7),
    Column("idle", "idle/fraction", "{:.0%}".format, 4, 130),
    Column("MFU", "mfu/update_actor", "{:.0%}".format, 4, 130),
    Column("seconds", "time/step_s", "{:.1f}".format, 8),
)
# Minimum width of a terminal to show the longest phases.
PHASES_MIN_TERMINAL = 120


class Eta:
    """Estimate of the time left, from the mean time of a step; `clock` has monotonic seconds."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> str:
        """Format the time left after `step`; '?' before the second step."""
        now = self._clock()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return "?"
        first_step, start = self._first
        return duration_text((now - start) / (step - first_step) * (self._total - step))


def title_row(terminal: int) -> str:
    """Format the titles of the columns that fit."""
    return _fitting(terminal, {column.metric: column.title for column in COLUMNS}) + (
        "  longest phases" if terminal >= PHASES_MIN_TERMINAL else ""
    )


def step_row(metrics: Metrics, terminal: int) -> str:
    """Format one step's numbers below the titles; unknown ones are blank."""
    phases = f"  {phases_text([metrics], 3)}" if terminal >= PHASES_MIN_TERMINAL else ""
    return _fitting(terminal, _texts(metrics)) + phases


def step_line(metrics: Metrics, total_steps: int, eta: str) -> str:
    """Format one step as a log line: known numbers with their names."""
    texts = _texts(metrics)
    texts.pop("response/truncated_fraction", None)
    parts = [f"step {texts.pop('step')}/{total_steps}"]
    seconds = texts.pop("time/step_s", None)
    titles = {column.metric: column.title for column in COLUMNS}
    parts += [f"{titles[metric]} {text}" for metric, text in texts.items()]
    if seconds is not None:
        parts.append(f"{seconds} s ({phases_text([metrics], 2)})")
    return "  ".join([*parts, f"ETA {eta}"])


def _texts(metrics: Metrics) -> dict[str, str]:
    """Format the known metrics of a step, by name."""
    known = [(column, metrics.get(column.metric)) for column in COLUMNS]
    return {column.metric: column.show(value) for column, value in known if value is not None}


def _fitting(terminal: int, texts: Mapping[str, str]) -> str:
    """Align the cells of the columns that fit."""
    return " ".join(
        f"{texts.get(column.metric, ''):>{column.width}}"
        for column in COLUMNS
        if column.min_terminal <= terminal
    )
