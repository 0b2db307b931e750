"""Console output of a run: header, steps, samples, warnings, summary.

A terminal shows a table above a live progress line; a log or pipe gets one plain line per step.
"""

import logging
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hybridrl.trainer.tracking.rollout_log import RolloutRecord
from hybridrl.trainer.tracking.steps import (
    LiveSteps,
    Metrics,
    StepLines,
    duration_text,
    short_name,
)
from hybridrl.trainer.tracking.summary import Speeds, Summary

MAX_SAMPLE_LINES = 8
MAX_SHARES_SHOWN = 6
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
        self._steps: StepLines | LiveSteps | None = None

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def logging_handler(self) -> logging.Handler:
        """Return a log handler that does not break the live display."""
        if not self.console.is_terminal:
            return logging.StreamHandler(self.console.file)
        handler = RichHandler(console=self.console, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
        return handler

    def header(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        """Print the header (trainer/tracking/header.py)."""
        self._framed(title, lines)

    def phase(self, name: str) -> None:
        """Show the current phase; the first one starts the progress line."""
        self._shown_steps().phase(name)

    def step(self, metrics: Metrics) -> None:
        """Show a finished step."""
        self._shown_steps().step(metrics)

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
            self._framed(title, lines)

    def warn(self, text: str) -> None:
        """Print a warning."""
        line = Text(f"warning: {text}", style="yellow")
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def summary(self, summary: Summary, run_dir: Path) -> None:
        """Print the summary."""
        self.close()
        if summary.changes:
            self.console.print(_accuracy_table(summary))
        per_step = summary.seconds / max(1, summary.steps)
        shares = [
            f"{short_name(share.phase)} {share.share:.0%}"
            for share in summary.shares[:MAX_SHARES_SHOWN]
        ]
        lines = [
            (
                "steps",
                f"{summary.steps} in {duration_text(summary.seconds)} ({per_step:.1f} s each)",
            ),
            ("time", ", ".join(shares)),
            *_speed_lines(summary.speeds),
        ]
        if summary.failed_rewards:
            lines.append(("rewards", f"{summary.failed_rewards:,} failed and got the failed score"))
        if summary.failed_checkpoints:
            lines.append(("checkpoints", f"{summary.failed_checkpoints:,} lost: see the warnings"))
        lines += [("directory", str(run_dir)), ("files", _files(run_dir))]
        self._framed("done", lines)

    def close(self) -> None:
        """Restore the terminal."""
        if self._steps is not None:
            self._steps.stop()
            self._steps = None

    def _shown_steps(self) -> StepLines | LiveSteps:
        if self._steps is None:
            kind = LiveSteps if self.console.is_terminal else StepLines
            self._steps = kind(self.console, self._total)
        return self._steps

    def _framed(self, title: str, lines: Sequence[tuple[str, str]]) -> None:
        """Print labelled texts: a panel on a terminal, else a title with lines below."""
        if self.console.is_terminal:
            frame = Panel(
                _grid(lines),
                title=Text(title),
                title_align="left",
                box=box.ROUNDED,
                width=self._text_width() + 4,
            )
            self.console.print(frame)
        else:
            text = "\n".join([f"-- {title}", *_plain_lines(lines, self._text_width())])
            self.console.print(Text(text), soft_wrap=True)

    def _text_width(self) -> int:
        return min(self.console.width - 4, MAX_TEXT_WIDTH)


def pick_samples(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Pick the best and the worst response of a step; one if all scores are equal."""
    if not records:
        return []
    best = max(records, key=lambda record: record.score)
    worst = min(records, key=lambda record: record.score)
    return [best] if best.score == worst.score else [best, worst]


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    """Build two columns, labels and folded texts."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold", ratio=1)
    for label, text in lines:
        grid.add_row(Text(label), Text(text))
    return grid


def _plain_lines(lines: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Format labels and texts without a terminal; words, thus paths, are never broken."""
    indent = max((len(label) for label, _ in lines), default=0) + 2
    plain = []
    for label, text in lines:
        parts = [
            part
            for line in text.split("\n")
            for part in textwrap.wrap(
                line, width - indent, break_long_words=False, break_on_hyphens=False
            )
        ] or [""]
        plain.append(f"{label:<{indent}}{parts[0]}".rstrip())
        plain += [" " * indent + part for part in parts[1:]]
    return plain


def _speed_lines(speeds: Speeds) -> list[tuple[str, str]]:
    """Format idle time and MFU, if known."""
    lines = []
    if speeds.idle is not None and speeds.outside is not None:
        outside = f"outside sampling, scoring and updates {speeds.outside:.0%}"
        lines.append(("idle", f"ranks {speeds.idle:.0%}; {outside}"))
    if speeds.mfu:
        shares = [f"{short_name(phase)} {share:.0%}" for phase, share in speeds.mfu.items()]
        lines.append(("MFU", ", ".join(shares)))
    return lines


def _accuracy_table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("held-out accuracy")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right")
    for change in summary.changes:
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
