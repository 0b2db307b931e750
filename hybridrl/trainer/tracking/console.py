"""Console output of a run: header, steps, samples, warnings, summary.

A terminal shows a table above a live progress line; a log or pipe gets one plain line per step.
"""

import logging
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hybridrl.trainer.tracking.rollout_log import RolloutRecord
from hybridrl.trainer.tracking.steps import StepDisplay
from hybridrl.trainer.tracking.summary import Change, Metrics, accuracy_changes, summary_lines

MAX_SAMPLE_LINES = 8
# Maximum width of text, also on wider terminals.
MAX_TEXT_WIDTH = 110


class RunConsole:
    """Console output of a run; a context manager that restores the terminal on exit.

    Args:
        total_steps: of the run.
        console: output; None: standard output.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._total = total_steps
        self._steps: StepDisplay | None = None

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logging_handler(self) -> logging.Handler:
        """Return a log handler that does not break the live display."""
        if not self.console.is_terminal:
            return logging.StreamHandler(self.console.file)
        handler = RichHandler(console=self.console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
        return handler

    def phase(self, name: str) -> None:
        """Show the current phase; the first one starts the progress line."""
        self._display().phase(name)

    def step(self, metrics: Metrics) -> None:
        """Show a finished step."""
        self._display().step(metrics)

    def samples(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Print responses with their prompts and scores."""
        # Labels and padding need ten columns.
        width = self._text_width() - 10
        for record in records:
            lines = [
                ("problem", _clip(record.question, width)),
                ("response", _clip(record.response, width) or "(empty)"),
                ("expected", _clip(record.answer, width)),
            ]
            title = f"sample of step {step}: score {record.score:g}, {record.length} tokens"
            self.header(title, lines)

    def warn(self, text: str) -> None:
        """Print a warning."""
        line = Text(f"warning: {text}", style="yellow")
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def summary(self, rows: Sequence[Metrics], failed_checkpoints: int, run_dir: Path) -> None:
        """Print the summary of a run from its metrics."""
        self.close()
        if changes := accuracy_changes(rows):
            self.console.print(_accuracy_table(changes))
        files = [("directory", str(run_dir)), ("files", _files(run_dir))]
        self.header("done", [*summary_lines(rows, failed_checkpoints), *files])

    def close(self) -> None:
        """Restore the terminal."""
        if self._steps is not None:
            self._steps.stop()
            self._steps = None

    def header(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        """Print labelled texts: a panel on a terminal, else a title with lines below."""
        if not self.console.is_terminal:
            # Not wrapped, so that paths are never broken.
            indent = max((len(label) for label, _ in lines), default=0) + 2
            plain = [f"-- {title}"]
            for label, text in lines:
                plain.append(f"{label:<{indent}}{text}".replace("\n", "\n" + " " * indent).rstrip())
            self.console.print(Text("\n".join(plain)), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold", ratio=1)
        for label, text in lines:
            grid.add_row(Text(label), Text(text))
        self.console.print(
            Panel(
                grid,
                title=Text(title),
                title_align="left",
                box=box.ROUNDED,
                width=self._text_width() + 4,
            )
        )

    def _display(self) -> StepDisplay:
        self._steps = self._steps or StepDisplay(self.console, self._total)
        return self._steps

    def _text_width(self) -> int:
        return min(self.console.width - 4, MAX_TEXT_WIDTH)


def _accuracy_table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("held-out accuracy")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for change in changes:
        gain = change.after - change.before
        table.add_row(
            change.name,
            _with_interval(change.before, change.before_ci),
            _with_interval(change.after, change.after_ci),
            Text(f"{gain:+.3f}", style="green" if gain > 0 else "red" if gain < 0 else ""),
        )
    return table


def _with_interval(value: float, half_width: float | None) -> str:
    """Format as '0.934 +- 0.027', or the value alone."""
    return f"{value:.3f}" if half_width is None else f"{value:.3f} +- {half_width:.3f}"


def _files(run_dir: Path) -> str:
    """List the run directory, folders with a slash."""
    if not run_dir.is_dir():
        return "(none)"
    there = sorted(path for path in run_dir.iterdir() if not path.name.startswith("."))
    return "  ".join(f"{path.name}/" if path.is_dir() else path.name for path in there)


def _clip(text: str, width: int) -> str:
    """Wrap a text to at most MAX_SAMPLE_LINES lines, without control characters."""
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text.strip())
    lines = [part for line in clean.split("\n") for part in textwrap.wrap(line, width) or [""]]
    shown = lines[:MAX_SAMPLE_LINES]
    return "\n".join(shown + (["..."] if len(lines) > len(shown) else []))
