"""Metrics as text: a row or line for each step, the time left, the summary of a run."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from hybridrl.trainer.tracking.header import count_text

ACCURACY = "eval/accuracy"
BEST = f"{ACCURACY}_best_of_"
STEP, OUTSIDE, IDLE = "time/step_s", "time/outside_s", "idle/mean_s"
EVALUATION = "time/evaluate_s"
MAX_SHARES_SHOWN = 6

Metrics = Mapping[str, float | None]

# Short names of phases.
_SHORT = {
    "old_log_probs": "old logp",
    "ref_log_probs": "ref logp",
    "model_scores": "rew model",
    "teacher_log_probs": "teacher",
    "update_actor": "actor",
    "update_critic": "critic",
    "evaluate": "eval",
}


class Column(NamedTuple):
    """Column of the table: one metric of a step, in `width` characters.

    It is shown on terminals of `min_terminal` characters and more, and in each plain line; its
    `meaning` in the summary.
    """

    title: str
    metric: str
    show: Callable[[float], str]
    width: int
    meaning: str = ""
    min_terminal: int = 0


Columns = Sequence[Column]


def _kl(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if abs(value) >= 5e-5 else f"{value:.0e}"


def _ratio(log_ratio: float) -> str:
    ratio = math.exp(min(log_ratio, 700.0))
    return f"{ratio:.2f}" if ratio < 1e5 else f"{ratio:.0e}"


COLUMNS = (
    Column("step", "step", "{:.0f}".format, 5),
    Column("reward", "reward/mean", "{:.3f}".format, 7, "mean of the step's responses"),
    Column("held-out", "eval/accuracy", "{:.3f}".format, 9, "mean reward, sampled, not trained on"),
    Column("greedy", "eval/accuracy_greedy", "{:.3f}".format, 7, "the same, decoded greedily", 100),
    Column("KL", "actor/kl", _kl, 8, "from the reference model, nats per token"),
    Column("to teacher", "teacher/kl", _kl, 10, "KL from the teachers, nats per token"),
    Column(
        "max ratio",
        "actor/log_ratio_max",
        _ratio,
        9,
        "largest factor by which a token's probability changed",
    ),
    Column("length", "response/length_mean", "{:.1f}".format, 7, "mean tokens of a response"),
    Column(
        "cut off", "response/truncated_fraction", "{:.1%}".format, 8, "at the length limit", 100
    ),
    Column(
        "tok/s", "rollout/tokens_per_second", count_text, 7, "sampled tokens a second of sampling"
    ),
    Column("idle", "idle/fraction", "{:.0%}".format, 4, "share of the step that ranks wait", 130),
    Column("MFU", "mfu/update_actor", "{:.0%}".format, 4, "share of the GPUs' peak, updates", 130),
    Column("seconds", "time/step_s", "{:.1f}".format, 8),
)
_SHARED = {column.metric: column for column in COLUMNS}
# The same of supervised fine-tuning.
SUPERVISED_COLUMNS = (
    _SHARED["step"],
    Column("loss", "actor/loss", "{:.4f}".format, 8),
    Column("held-out loss", "eval/nll", "{:.4f}".format, 14),
    _SHARED["eval/accuracy"],
    _SHARED["eval/accuracy_greedy"],
    Column("gradient", "actor/grad_norm", "{:.2f}".format, 9),
    _SHARED["response/length_mean"],
    Column("tok/s", "tokens_per_s/update_actor", count_text, 7),
    _SHARED["idle/fraction"],
    _SHARED["mfu/update_actor"],
    _SHARED[STEP],
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


def title_row(terminal: int, columns: Columns = COLUMNS) -> str:
    """Format the titles of the columns that fit."""
    titles = {column.metric: column.title for column in columns}
    return _fitting(terminal, columns, titles, "longest phases")


def step_row(metrics: Metrics, terminal: int, columns: Columns = COLUMNS) -> str:
    """Format one step's numbers below the titles; unknown ones are blank."""
    texts = _texts(metrics, columns)
    return _fitting(terminal, columns, texts, phases_text([metrics], 3))


def step_line(metrics: Metrics, total_steps: int, eta: str, columns: Columns = COLUMNS) -> str:
    """Format one step as a log line: known numbers with their names."""
    texts = _texts(metrics, columns)
    parts = [f"step {texts.pop('step')}/{total_steps}"]
    seconds = texts.pop("time/step_s", None)
    titles = {column.metric: column.title for column in columns}
    parts += [f"{titles[metric]} {text}" for metric, text in texts.items()]
    if seconds is not None:
        parts.append(f"{seconds} s ({phases_text([metrics], 2)})")
    return "  ".join([*parts, f"ETA {eta}"])


def _texts(metrics: Metrics, columns: Columns) -> dict[str, str]:
    """Format the known metrics of a step, by name."""
    known = [(column, metrics.get(column.metric)) for column in columns]
    return {column.metric: column.show(value) for column, value in known if value is not None}


def _fitting(terminal: int, columns: Columns, texts: Mapping[str, str], phases: str) -> str:
    """Align the cells of the columns that fit."""
    fitting = [column for column in columns if column.min_terminal <= terminal]
    cells = [f"{texts.get(column.metric, ''):>{column.width}}" for column in fitting]
    return " ".join(cells + [f" {phases}"] * (terminal >= PHASES_MIN_TERMINAL))


class Change(NamedTuple):
    """Accuracy of a rule or group before and after training, with the half-widths of their 95 %
    intervals if computed.
    """

    name: str
    before: tuple[float, float | None]
    after: tuple[float, float | None]


def summary_lines(rows: Sequence[Metrics], failed_checkpoints: int) -> list[tuple[str, str]]:
    """Describe a run as (label, text) pairs; no row counts a loss of the last checkpoint."""
    steps = max([int(row["step"] or 0) for row in rows], default=0)
    seconds, idle, outside = (_total(rows, name) for name in (STEP, IDLE, OUTSIDE))
    training = (seconds or 0.0) - (_total(rows, EVALUATION) or 0.0)
    each = f"{training / max(1, steps):.1f} s each without evaluations"
    lines = [
        ("steps", f"{steps} in {duration_text(seconds or 0.0)} ({each})"),
        ("time", phases_text(rows, MAX_SHARES_SHOWN)),
    ]
    if seconds and idle is not None and outside is not None:
        computing = f"outside sampling, scoring and updates {outside / seconds:.0%}"
        waited = _total(rows, "environment/seconds")
        waiting = f"; engines waited for the environment {waited / seconds:.0%}" if waited else ""
        lines.append(("idle", f"ranks {idle / seconds:.0%}; {computing}{waiting}"))
    mfu = dict.fromkeys(name for row in rows for name in row if name.startswith("mfu/"))
    means = {name: fmean(known) for name in mfu if (known := _known(rows, name))}
    if means:
        texts = [f"{short_name(name[len('mfu/') :])} {mean:.0%}" for name, mean in means.items()]
        lines.append(("MFU", ", ".join(texts)))
    if failed := _total(rows, "reward/failed"):
        lines.append(("rewards", f"{failed:,.0f} failed and got the failed score"))
    if failed_checkpoints:
        lines.append(("checkpoints", f"{failed_checkpoints:,} lost: see the warnings"))
    return lines


def legend(rows: Sequence[Metrics], terminal: int | None = None) -> str:
    """Explain the columns that the rows have, on a terminal or in a log; empty without any."""
    fitting = [column for column in COLUMNS if terminal is None or column.min_terminal <= terminal]
    shown = [column for column in fitting if column.meaning and _known(rows, column.metric)]
    meanings = [f"{column.title}: {column.meaning}" for column in shown]
    if _known(rows, "eval/ci95"):
        meanings.append("+-: larger half of the 95 % confidence interval")
    return "; ".join(meanings)


def accuracy_changes(rows: Sequence[Metrics]) -> list[Change]:
    """Compare the accuracies of the first and the last evaluation, the main ones first; a run that
    was killed before its second one has none.
    """
    evaluated = [row for row in rows if row.get(ACCURACY) is not None]
    if len(evaluated) < 2:
        return []
    first, last = evaluated[0], evaluated[-1]
    best = next((name.removeprefix(ACCURACY) for name in first if name.startswith(BEST)), "")
    leading = ["_greedy", "", best, "_unseen"]
    suffixes = sorted(n.removeprefix(ACCURACY) for n in first if n.startswith(ACCURACY))
    changes = []
    for suffix in sorted(suffixes, key=lambda s: leading.index(s) if s in leading else 4):
        before, after = first[ACCURACY + suffix], last.get(ACCURACY + suffix)
        if before is not None and after is not None:
            interval = f"eval/ci95{suffix}"
            pairs = (before, first.get(interval)), (after, last.get(interval))
            changes.append(Change(accuracy_label(suffix), *pairs))
    return changes


def first_evaluated(rows: Sequence[Metrics]) -> str:
    """Return the title of the first evaluation's accuracies: before training, or its step."""
    steps = [int(row["step"] or 0) for row in rows if row.get(ACCURACY) is not None]
    return f"step {steps[0]}" if steps and steps[0] else "before"


def phase_shares(rows: Sequence[Metrics]) -> list[tuple[str, float]]:
    """Compute each phase's share of the steps' time, longest first; `other` is the rest."""
    names = {name for row in rows for name in row if name.startswith("time/")} - {STEP, OUTSIDE}
    total = _total(rows, STEP) or 0.0
    seconds = {name[len("time/") : -len("_s")]: _total(rows, name) or 0.0 for name in names}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    ordered = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    return [(name, spent / total) for name, spent in ordered if spent > 0 and total > 0]


def phases_text(rows: Sequence[Metrics], count: int) -> str:
    """Format the longest phases: 'rollout 41%, actor 22%'."""
    shares = phase_shares(rows)[:count]
    return ", ".join(f"{short_name(phase)} {share:.0%}" for phase, share in shares)


def short_name(phase: str) -> str:
    """Shorten a phase's name."""
    return _SHORT.get(phase, phase)


def accuracy_label(suffix: str) -> str:
    """Return the label of eval/accuracy<suffix>."""
    return suffix.strip("_").replace("_", " ") or "sampled"


def duration_text(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 0:09, 1:33, 2:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _known(rows: Sequence[Metrics], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


def _total(rows: Sequence[Metrics], name: str) -> float | None:
    """Sum a metric over the rows; None if no row knows it."""
    known = _known(rows, name)
    return sum(known) if known else None
