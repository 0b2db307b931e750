"""How steps are shown: rows above a live progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from hybridrl.trainer.tracking.columns import (
    Metrics,
    duration_text,
    phases_text,
    short_name,
    step_line,
    step_row,
    title_row,
)

# Titles come again after so many rows.
ROWS_BETWEEN_TITLES = 25


class Steps(Protocol):
    """How steps are shown."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        ...

    def step(self, metrics: Metrics) -> None:
        """A step has ended."""
        ...

    def stop(self) -> None:
        """No more steps come."""
        ...


class Eta:
    """Time left, from the time that steps have taken so far.

    Args:
        total_steps: of the run.
        clock: seconds that only grow.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> str:
        """Text of the time left when `step` has just ended; '?' before two steps are known."""
        now = self._clock()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return "?"
        first_step, start = self._first
        return duration_text((now - start) / (step - first_step) * (self._total - step))


class StepLines:
    """One plain line per step, for logs and pipes."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._eta = Eta(total_steps)

    def phase(self, name: str) -> None:
        """Not shown."""

    def step(self, metrics: Metrics) -> None:
        """Print the step's line."""
        eta = self._eta.after(int(metrics["step"] or 0))
        print_line(self._console, Text(step_line(metrics, self._total, eta)))

    def stop(self) -> None:
        """Nothing is left to stop."""


class LiveSteps:
    """A row per step above a progress bar that names the phase at work."""

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
        """Name the phase at work."""
        self._progress.update(self._task, phase=short_name(name))

    def step(self, metrics: Metrics) -> None:
        """Add the step's row and move the bar."""
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
        """Take the progress line away and give the cursor back."""
        self._live.stop()

    def _view(self) -> RenderableType:
        return Group(self._progress, self._last)


def print_line(console: Console, text: Text) -> None:
    """One line: a terminal cuts off what has no room, a log or pipe gets all of it."""
    if console.is_terminal:
        console.print(text, overflow="ellipsis", no_wrap=True)
    else:
        console.print(text, soft_wrap=True)
