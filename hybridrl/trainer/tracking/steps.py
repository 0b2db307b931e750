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
from hybridrl.trainer.tracking.summary import Metrics, phase_shares

# Short names of phases.
_SHORT = {
    "old_log_probs": "old logp",
    "ref_log_probs": "ref logp",
    "model_scores": "rew model",
    "update_actor": "actor",
    "update_critic": "critic",
    "evaluate": "eval",
}


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
    Column("step", "step", lambda value: f"{value:.0f}", 5),
    Column("reward", "reward/mean", lambda value: f"{value:.3f}", 7),
    Column("held-out", "eval/accuracy", lambda value: f"{value:.3f}", 9),
    Column("greedy", "eval/accuracy_greedy", lambda value: f"{value:.3f}", 7, 100),
    Column("KL", "actor/kl", _kl, 8),
    Column("max ratio", "actor/log_ratio_max", lambda value: f"{_exp(value):.2f}", 9),
    Column("length", "response/length_mean", lambda value: f"{value:.1f}", 7),
    Column("cut off", "response/truncated_fraction", lambda value: f"{value:.1%}", 8, 100),
    Column("tok/s", "rollout/tokens_per_second", count_text, 7),
    Column("idle", "idle/fraction", lambda value: f"{value:.0%}", 4, 130),
    Column("MFU", "mfu/update_actor", lambda value: f"{value:.0%}", 4, 130),
    Column("seconds", "time/step_s", lambda value: f"{value:.1f}", 8),
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


class StepLines:
    """Plain line per step, for logs and pipes."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._eta = Eta(total_steps)

    def phase(self, name: str) -> None:
        """Show nothing."""

    def step(self, metrics: Metrics) -> None:
        """Print the step's line."""
        eta = self._eta.after(int(metrics["step"] or 0))
        print_line(self._console, Text(step_line(metrics, self._total, eta)))

    def stop(self) -> None:
        """Do nothing."""


class LiveSteps:
    """Row per step above a progress bar with the current phase."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
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
        self._live = Live(self._view(), console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, name: str) -> None:
        """Show the current phase."""
        self._progress.update(self._task, phase=short_name(name))

    def step(self, metrics: Metrics) -> None:
        """Print the step's row and move the bar."""
        width = self._console.width
        if self._rows % ROWS_BETWEEN_TITLES == 0:
            print_line(self._console, Text(title_row(width), style="bold"))
        self._rows += 1
        evaluated = "eval/accuracy" in metrics and metrics["eval/accuracy"] is not None
        style = "green" if evaluated else ""
        print_line(self._console, Text(step_row(metrics, width), style=style))
        step = int(metrics["step"] or 0)
        self._progress.update(self._task, completed=step, eta=self._eta.after(step))
        self._last = Text(f"last step: {phases_text(metrics, 4)}", style="dim", no_wrap=True)
        self._live.update(self._view())

    def stop(self) -> None:
        """Remove the progress line and restore the cursor."""
        self._live.stop()

    def _view(self) -> RenderableType:
        return Group(self._progress, self._last)


def print_line(console: Console, text: Text) -> None:
    """Print one line, truncated on a terminal only."""
    if console.is_terminal:
        console.print(text, overflow="ellipsis", no_wrap=True)
    else:
        console.print(text, soft_wrap=True)


def title_row(terminal: int) -> str:
    """Format the titles of the columns that fit."""
    return _fitting(terminal, {column.metric: column.title for column in COLUMNS}) + (
        "  longest phases" if terminal >= PHASES_MIN_TERMINAL else ""
    )


def step_row(metrics: Metrics, terminal: int) -> str:
    """Format one step's numbers below the titles; unknown ones are blank."""
    phases = f"  {phases_text(metrics, 3)}" if terminal >= PHASES_MIN_TERMINAL else ""
    return _fitting(terminal, _texts(metrics)) + phases


def step_line(metrics: Metrics, total_steps: int, eta: str) -> str:
    """Format one step as a log line: known numbers with their names."""
    texts = _texts(metrics)
    texts.pop("response/truncated_fraction", None)
    parts = [f"step {texts.pop('step')}/{total_steps}"]
    seconds = texts.pop("time/step_s") if "time/step_s" in texts else None
    titles = {column.metric: column.title for column in COLUMNS}
    parts += [f"{titles[metric]} {text}" for metric, text in texts.items()]
    if seconds is not None:
        parts.append(f"{seconds} s ({phases_text(metrics, 2)})")
    return "  ".join([*parts, f"ETA {eta}"])


def phases_text(metrics: Metrics, count: int) -> str:
    """Format the longest phases of a step: 'rollout 41%, actor 22%'."""
    shares = phase_shares([metrics])[:count]
    return ", ".join(f"{short_name(share.phase)} {share.share:.0%}" for share in shares)


def short_name(phase: str) -> str:
    """Shorten a phase's name."""
    return _SHORT.get(phase, phase)


def duration_text(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 0:09, 1:33, 2:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _texts(metrics: Metrics) -> dict[str, str]:
    """Format the known metrics of a step, by name."""
    texts = {}
    for column in COLUMNS:
        value = metrics.get(column.metric)
        if value is not None:
            texts[column.metric] = column.show(value)
    return texts


def _fitting(terminal: int, texts: Mapping[str, str]) -> str:
    """Align the cells of the columns that fit."""
    cells = []
    for column in COLUMNS:
        if column.min_terminal <= terminal:
            text = texts.get(column.metric, "")
            cells.append(f"{text:>{column.width}}")
    return " ".join(cells)


def _exp(value: float) -> float:
    return math.exp(min(value, 50.0))
