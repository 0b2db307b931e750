"""Display of steps: rows above a live progress bar on a terminal, else one plain line each."""

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from hybridrl.trainer.tracking.header import count_text
from hybridrl.trainer.tracking.summary import Metrics, duration_text, phases_text, short_name


class Column(NamedTuple):
    """Column of the table: one metric of a step.

    Attributes:
        title: above the column, or before the number.
        metric: its name in metrics.jsonl.
        show: formats the number.
        width: characters.
        min_terminal: minimum width of a terminal to show the column.
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
# Rows until the titles are repeated.
ROWS_BETWEEN_TITLES = 25


class Eta:
    """Estimate of the time left, from the mean time of a step.

    Args:
        total_steps: of the run.
        clock: monotonic seconds.
    """

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


class StepDisplay:
    """Row per step above a progress bar with the current phase; without a terminal, plain lines."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._eta = Eta(total_steps)
        self._rows = 0
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("ETA {task.fields[eta]}"),
            TextColumn("[cyan]{task.fields[phase]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=total_steps, eta="?", phase="starting")
        self._last = Text("")
        self._live = Live(
            get_renderable=self._view, console=console, refresh_per_second=4, transient=True
        )
        if console.is_terminal:
            self._live.start()

    def phase(self, name: str) -> None:
        """Show the current phase."""
        self._progress.update(self._task, phase=short_name(name))

    def step(self, metrics: Metrics) -> None:
        """Print the step's row and move the bar, or print the step's line."""
        step = int(metrics["step"] or 0)
        eta, width = self._eta.after(step), self._console.width
        if not self._console.is_terminal:
            self._console.print(Text(step_line(metrics, self._total, eta)), soft_wrap=True)
            return
        if self._rows % ROWS_BETWEEN_TITLES == 0:
            self._print(title_row(width), "bold")
        self._rows += 1
        style = "" if metrics.get("eval/accuracy") is None else "green"
        self._print(step_row(metrics, width), style)
        self._progress.update(self._task, completed=step, eta=eta)
        self._last = Text(f"last step: {phases_text([metrics], 4)}", style="dim", no_wrap=True)

    def stop(self) -> None:
        """Remove the progress line and restore the cursor."""
        self._live.stop()

    def _view(self) -> RenderableType:
        return Group(self._progress, self._last)

    def _print(self, row: str, style: str) -> None:
        self._console.print(Text(row, style=style), overflow="ellipsis", no_wrap=True)


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
