"""Which numbers of a step are shown, in which order and how."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hybridrl.trainer.tracking.header import count_text
from hybridrl.trainer.tracking.summary import phase_shares

Metrics = Mapping[str, float | None]

# Names of phases where there is little room.
_SHORT = {
    "old_log_probs": "old logp",
    "ref_log_probs": "ref logp",
    "model_scores": "rew model",
    "update_actor": "actor",
    "update_critic": "critic",
    "evaluate": "eval",
}


class Column(NamedTuple):
    """One number of a step.

    Attributes:
        title: above the column, or before the number.
        metric: in metrics.jsonl.
        show: the number as text.
        width: of the column, in characters.
        min_terminal: narrower terminals leave the column out.
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
# From this width on a row ends with the phases that took longest.
PHASES_MIN_TERMINAL = 120


def title_row(terminal: int) -> str:
    """The titles above the columns that fit."""
    return _fitting(terminal, {column.metric: column.title for column in COLUMNS}) + (
        "  longest phases" if terminal >= PHASES_MIN_TERMINAL else ""
    )


def step_row(metrics: Metrics, terminal: int) -> str:
    """One step's numbers under the titles; an unknown one leaves its place empty."""
    phases = f"  {phases_text(metrics, 3)}" if terminal >= PHASES_MIN_TERMINAL else ""
    return _fitting(terminal, _texts(metrics)) + phases


def step_line(metrics: Metrics, total_steps: int, eta: str) -> str:
    """One step as a line of its own, for logs: known numbers with their names."""
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
    """The phases of one step that took longest: 'rollout 41%, actor 22%'."""
    shares = phase_shares([metrics])[:count]
    return ", ".join(f"{short_name(share.phase)} {share.share:.0%}" for share in shares)


def short_name(phase: str) -> str:
    """A phase's name in few letters."""
    return _SHORT.get(phase, phase)


def duration_text(seconds: float) -> str:
    """Hours, minutes and seconds: 0:09, 1:33, 2:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _texts(metrics: Metrics) -> dict[str, str]:
    """The known columns of a step as texts, by metric."""
    texts = {}
    for column in COLUMNS:
        value = metrics.get(column.metric)
        if value is not None:
            texts[column.metric] = column.show(value)
    return texts


def _fitting(terminal: int, texts: Mapping[str, str]) -> str:
    """Right-aligned cells of the columns that a terminal has room for."""
    cells = []
    for column in COLUMNS:
        if column.min_terminal <= terminal:
            text = texts.get(column.metric, "")
            cells.append(f"{text:>{column.width}}")
    return " ".join(cells)


def _exp(value: float) -> float:
    return math.exp(min(value, 50.0))
