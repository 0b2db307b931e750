"""Console output of a run: header, steps, samples, warnings, summary.

A terminal shows a table above a live progress line; a log or pipe gets one plain line per step.
"""

import logging
import os
import shlex
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from hybridrl.checkpoint.files import checkpoints_folder, steps_in
from hybridrl.trainer.record import RolloutRecord
from hybridrl.trainer.tracking.summary import (
    COLUMNS,
    Change,
    Columns,
    Eta,
    Metrics,
    accuracy_changes,
    first_evaluated,
    legend,
    phases_text,
    short_name,
    step_line,
    step_row,
    summary_lines,
    title_row,
)
from hybridrl.trainer.tracking.tracker import METRICS_FILE, REPORT_FILE

log = logging.getLogger(__name__)

MAX_SAMPLE_LINES = 8
# Accuracies in the summary.
MAX_ACCURACIES = 4
# Maximum width of text, also on wider terminals.
MAX_TEXT_WIDTH = 110
# Rows until the titles are repeated.
ROWS_BETWEEN_TITLES = 25


class RunConsole:
    """Console output of a run; a context manager that restores the terminal on exit."""

    def __init__(
        self, total_steps: int, console: Console | None = None, columns: Columns = COLUMNS
    ) -> None:
        self.console = console or Console(highlight=False)
        self._total = total_steps
        self._eta = Eta(total_steps)
        self._columns = columns
        self._rows = 0
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("ETA {task.fields[eta]}"),
            TextColumn("[cyan]{task.fields[phase]}"),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=total_steps, eta="?", phase="starting")
        self._last = Text("")
        self._live = Live(
            get_renderable=lambda: Group(self._progress, self._last),
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logging_handler(self) -> logging.Handler:
        """Return a log handler that does not break the live display."""
        handler: logging.Handler = logging.StreamHandler(self.console.file)
        if self.console.is_terminal:
            handler = RichHandler(console=self.console, show_path=False, markup=False)
            handler.setFormatter(logging.Formatter("%(message)s"))
        handler.addFilter(lambda record: "printed" not in vars(record))
        return handler

    def phase(self, name: str) -> None:
        """Show the current phase; the first one starts the progress line."""
        if self.console.is_terminal:
            self._live.start()
            self._progress.update(self._task, phase=short_name(name))

    def step(self, metrics: Metrics) -> None:
        """Print the step's row and move the progress bar, or print the step's line."""
        step = int(metrics["step"] or 0)
        eta, width = self._eta.after(step), self.console.width
        if not self.console.is_terminal:
            line = step_line(metrics, self._total, eta, self._columns)
            self.console.print(Text(line), soft_wrap=True)
            return
        style = "" if metrics.get("eval/accuracy") is None else "green"
        rows = [Text(step_row(metrics, width, self._columns), style=style)]
        if self._rows % ROWS_BETWEEN_TITLES == 0:
            rows.insert(0, Text(title_row(width, self._columns), style="bold"))
        self._rows += 1
        for row in rows:
            self.console.print(row, overflow="ellipsis", no_wrap=True)
        self._progress.update(self._task, completed=step, eta=eta)
        self._last = Text(f"last step: {phases_text([metrics], 4)}", style="dim", no_wrap=True)

    def samples(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Print responses with their prompts and scores."""
        # Labels and padding need ten columns.
        width = self._text_width() - 10
        for record in records:
            turns = record.turns
            if turns is None:
                turns = [{"role": "response", "text": record.response}]
            # An agent's program may ask in its own words.
            own = record.turns is not None and record.question.strip() not in record.prompt
            lines = [
                ("problem", _clip(record.question, width)),
                *([("model read", _clip(record.prompt, width))] if own else []),
                *([("failed", _clip(record.failure, width))] if record.failure else []),
                *((turn["role"], _clip(turn["text"], width) or "(empty)") for turn in turns),
                *([("expected", _clip(record.answer, width))] if record.answer else []),
            ]
            title = f"sample of step {step}: score {record.score:g}, {record.length} tokens"
            self.header(title, lines)

    def warn(self, text: str) -> None:
        """Print a warning, and write it to the log file."""
        self.note(f"warning: {text}", style="yellow")
        log.warning("%s", text, extra={"printed": True})

    def note(self, text: str, style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)

    def summary(
        self,
        rows: Sequence[Metrics],
        failed_checkpoints: int,
        run_dir: Path,
        *,
        needs_trust: bool = False,
        may_grow: bool = True,
        epochs: float | None = None,
        has_report: bool = True,
    ) -> None:
        """Print the summary of a run from its metrics.

        `needs_trust` is as of an evaluation; a run that `may_grow` can be resumed with more steps,
        or with more than its `epochs`. One that `has_report` writes its report after this.
        """
        self.close()
        if changes := accuracy_changes(rows):
            self.console.print(_accuracy_table(changes[:MAX_ACCURACIES], first_evaluated(rows)))
            if (more := len(changes) - MAX_ACCURACIES) > 0:
                self.note(f"{more} more accuracies (eval/...): {run_dir / METRICS_FILE}")
        steps = max([int(row["step"] or 0) for row in rows], default=0)
        longer = f"total_steps={2 * steps}" if epochs is None else f"epochs={2 * epochs:g}"
        grown = [f" trainer.{longer}"] * may_grow
        overrides = grown if steps >= self._total else [""]
        report = {REPORT_FILE} if has_report else set()
        commands = _next_commands(run_dir, overrides, needs_trust, has_report)
        lines = [
            *summary_lines(rows, failed_checkpoints),
            ("directory", str(run_dir)),
            ("files", _files(run_dir, report)),
            ("columns", legend(rows, self.console.width if self.console.is_terminal else None)),
            ("next", "\n".join(commands)),
        ]
        self.header("done", [line for line in lines if line[1]])

    def close(self) -> None:
        """Restore the terminal: remove the progress line, show the cursor."""
        self._live.stop()

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
        width = self._text_width() + 4
        self.console.print(Panel(grid, title=Text(title), title_align="left", width=width))

    def _text_width(self) -> int:
        return min(self.console.width - 4, MAX_TEXT_WIDTH)


def _accuracy_table(changes: Sequence[Change], first: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("held-out accuracy")
    for title in (first, "after", "change"):
        table.add_column(title, justify="right")
    for name, before, after in changes:
        gain = after[0] - before[0]
        # '0.934 +- 0.027', or the value alone
        values = [
            " +- ".join(f"{part:.3f}" for part in pair if part is not None)
            for pair in (before, after)
        ]
        style = "green" if gain > 0 else "red" if gain < 0 else ""
        table.add_row(Text(name), *values, Text(f"{gain:+.3f}", style=style))
    return table


def _next_commands(
    run_dir: Path, overrides: Sequence[str], needs_trust: bool, has_report: bool
) -> list[str]:
    """Return commands that go on with a run, resumed with each of the `overrides`."""
    run = str(run_dir)
    with suppress(OSError):  # the directory was removed meanwhile
        # `hybridrl resume` leaves the directory of the user's shell.
        if os.path.samefile(os.environ.get("PWD", ""), ".") and Path.cwd() in run_dir.parents:
            run = os.path.relpath(run_dir)
    run = shlex.quote(run)
    report = [] if has_report else [f"hybridrl report {run}"]
    if not steps_in(checkpoints_folder(run_dir)):
        return report
    return [
        *report,
        f"hybridrl eval {run}" + " --run-code" * needs_trust,
        f"hybridrl export {run} my_model",
        *(f"hybridrl resume {run}{override}" for override in overrides),
    ]


def _files(run_dir: Path, more: set[str]) -> str:
    """List the run directory, with files that are written next; folders have a slash."""
    if not run_dir.is_dir():
        return "(none)"
    there = {path.name + "/" * path.is_dir() for path in run_dir.iterdir()}
    return "  ".join(sorted(name for name in there | more if not name.startswith(".")))


def _clip(text: str, width: int) -> str:
    """Wrap a text to at most MAX_SAMPLE_LINES lines, without control characters."""
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text.strip())
    lines = [part for line in clean.split("\n") for part in textwrap.wrap(line, width) or [""]]
    shown = lines[:MAX_SAMPLE_LINES]
    return "\n".join(shown + (["..."] if len(lines) > len(shown) else []))
