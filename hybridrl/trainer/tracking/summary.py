"""Summary of a run from its metrics: accuracy before and after, time by phase."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

ACCURACY = "eval/accuracy"
STEP, OUTSIDE, IDLE = "time/step_s", "time/outside_s", "idle/mean_s"
MAX_SHARES_SHOWN = 6

Metrics = Mapping[str, float | None]

# Short names of phases.
_SHORT = {
    "old_log_probs": "old logp",
    "ref_log_probs": "ref logp",
    "model_scores": "rew model",
    "update_actor": "actor",
    "update_critic": "critic",
    "evaluate": "eval",
}


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
    each = f"{(seconds or 0.0) / max(1, steps):.1f} s each"
    lines = [
        ("steps", f"{steps} in {duration_text(seconds or 0.0)} ({each})"),
        ("time", phases_text(rows, MAX_SHARES_SHOWN)),
    ]
    if seconds and idle is not None and outside is not None:
        computing = f"outside sampling, scoring and updates {outside / seconds:.0%}"
        lines.append(("idle", f"ranks {idle / seconds:.0%}; {computing}"))
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


def accuracy_changes(rows: Sequence[Metrics]) -> list[Change]:
    """Compare each accuracy of the first and the last evaluation, the plain one first."""
    evaluated = [row for row in rows if row.get(ACCURACY) is not None]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    changes = []
    for name in sorted(first, key=lambda name: (name != ACCURACY, name)):
        before, after = first[name], last.get(name)
        if name.startswith(ACCURACY) and before is not None and after is not None:
            suffix = name.removeprefix(ACCURACY)
            interval = f"eval/ci95{suffix}"
            pairs = (before, first.get(interval)), (after, last.get(interval))
            changes.append(Change(accuracy_label(suffix), *pairs))
    return changes


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
