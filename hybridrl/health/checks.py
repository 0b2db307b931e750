"""The health checks by id, as in checks.yaml.

A new check is an entry there, and its threshold in conf/health and HealthConfig. One that is more
than a comparison is also a function of the same name in judges.py.
"""

import operator
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple

import yaml

from hybridrl.health.judges import JUDGES, Judge, Seen


class Check(NamedTuple):
    """A health check; its judge returns the evidence if the run is ill."""

    judge: Judge
    remedy: str
    always: bool


def comparing(is_ill: Callable[[float, float], bool], text: str, metrics: Sequence[str]) -> Judge:
    """Return a judge of metrics by the threshold; `text` has {value} and {role}, their prefix."""

    def judge(seen: Seen) -> str | None:
        texts = [
            text.format(value=value, role=metric.partition("/")[0])
            for metric in metrics
            if (value := seen.get(metric)) is not None and is_ill(value, seen.limit)
        ]
        return "; ".join(texts) or None

    return judge


def growing(metric: str, least: float, text: str) -> Judge:
    """Return a judge that a metric is not several times its first value, from `least` on.

    The threshold is the factor; `text` has {value} and {first}.
    """

    def judge(seen: Seen) -> str | None:
        value, first = seen.get(metric), seen.first(metric)
        if value is None or first is None or value <= max(least, seen.limit * first):
            return None
        return text.format(value=value, first=first)

    return judge


def _check(name: str, entry: dict[str, str]) -> Check:
    judge = JUDGES.get(name)
    for side, is_ill in (("above", operator.gt), ("below", operator.lt)):
        if side in entry:
            judge = comparing(is_ill, entry["evidence"], entry[side].split())
    if "growing" in entry:
        judge = growing(entry["growing"], float(entry["least"]), entry["evidence"])
    assert judge is not None, name
    return Check(judge, entry["remedy"], "always" in entry)


CHECKS: dict[str, Check] = {
    name: _check(name, entry)
    for name, entry in yaml.safe_load((files(__package__) / "checks.yaml").read_text()).items()
}
