"""Summary of a run from its metrics: accuracy before and after, time by phase."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

ACCURACY = "eval/accuracy"
# Times that are not of a phase: the whole step, and the time outside computation.
OUTSIDE = "time/outside_s"
NO_PHASES = frozenset({"time/step_s", OUTSIDE})

Metrics = Mapping[str, float | None]


class Change(NamedTuple):
    """Accuracy before and after training.

    Attributes:
        name: of the rule or group.
        before, after: mean scores.
        before_ci, after_ci: half-widths of their 95 % intervals, if computed.
    """

    name: str
    before: float
    after: float
    before_ci: float | None = None
    after_ci: float | None = None


class Share(NamedTuple):
    """Seconds of a phase over the whole run, and its share of the steps' time."""

    phase: str
    seconds: float
    share: float


class Summary(NamedTuple):
    """Summary of a run."""

    steps: int
    seconds: float
    changes: list[Change]
    shares: list[Share]
    failed_rewards: int
    failed_checkpoints: int
    speeds: "Speeds"


class Speeds(NamedTuple):
    """Utilization of the devices over the whole run; None if unknown.

    Attributes:
        idle: share of the steps' time in which a rank ran no worker call, mean over ranks.
        outside: share of the steps' time outside sampling, forward passes and updates.
        mfu: by phase, mean over the steps.
    """

    idle: float | None
    outside: float | None
    mfu: dict[str, float]


def summarize(rows: Sequence[Metrics], failed_checkpoints: int = 0) -> Summary:
    """Summarize all steps' metrics.

    Args:
        rows: as in metrics.jsonl; row 0 is the evaluation before training.
        failed_checkpoints: number of lost ones; no row counts a loss of the last one.
    """
    seconds = _total(rows, "time/step_s")
    return Summary(
        steps=max([int(row["step"] or 0) for row in rows], default=0),
        seconds=seconds,
        changes=_changes(rows),
        shares=phase_shares(rows),
        failed_rewards=int(_total(rows, "reward/failed")),
        failed_checkpoints=failed_checkpoints,
        speeds=Speeds(
            idle=_total(rows, "idle/mean_s") / seconds if _knows(rows, "idle/mean_s") else None,
            outside=_total(rows, OUTSIDE) / seconds if _knows(rows, OUTSIDE) else None,
            mfu=_mean_mfu(rows),
        ),
    )


def phase_shares(rows: Sequence[Metrics]) -> list[Share]:
    """Sum the time by phase, longest first; `other` is the rest."""
    total = _total(rows, "time/step_s")
    names = {name for row in rows for name in row if name.startswith("time/")} - NO_PHASES
    seconds = {name.removeprefix("time/").removesuffix("_s"): _total(rows, name) for name in names}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    ordered = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    return [Share(name, spent, spent / total) for name, spent in ordered if spent > 0 and total > 0]


def _changes(rows: Sequence[Metrics]) -> list[Change]:
    """Compare each accuracy of the first and the last evaluation, the plain one first."""
    evaluated = [row for row in rows if ACCURACY in row and row[ACCURACY] is not None]
    if not evaluated:
        return []
    first, last = evaluated[0], evaluated[-1]
    names = [name for name in first if name.startswith(ACCURACY) and name in last]
    changes = []
    for name in sorted(names, key=lambda name: (name != ACCURACY, name)):
        before, after = first[name], last[name]
        if before is not None and after is not None:
            suffix = name.removeprefix(ACCURACY)
            label = accuracy_label(suffix)
            widths = [row.get(f"eval/ci95{suffix}") for row in (first, last)]
            changes.append(Change(label, before, after, *widths))
    return changes


def accuracy_label(suffix: str) -> str:
    """Return the label of eval/accuracy<suffix>."""
    return suffix.strip("_").replace("_", " ") or "sampled"


def _mean_mfu(rows: Sequence[Metrics]) -> dict[str, float]:
    """Compute the mean MFU of each phase over the steps that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("mfu/") and value is not None:
                found.setdefault(name.removeprefix("mfu/"), []).append(value)
    return {phase: fmean(values) for phase, values in found.items()}


def _knows(rows: Sequence[Metrics], name: str) -> bool:
    return any(row[name] is not None for row in rows if name in row)


def _total(rows: Sequence[Metrics], name: str) -> float:
    return sum(row[name] or 0.0 for row in rows if name in row)
