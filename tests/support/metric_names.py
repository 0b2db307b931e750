"""Rows of metrics: the names that docs/metrics.md explains, and numbers of a step on policy."""

import math
import re
from collections.abc import Iterable

from tests.support.runs import ROOT


def explained() -> list[str]:
    """The names in the tables; <...> stands for any word."""
    tables = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    return [name for cell in tables for name in re.findall(r"`([^`]+)`", cell)]


def unexplained(names: Iterable[str]) -> list[str]:
    """Those of `names` that no name in the tables matches."""
    patterns = [re.sub(r"<\w+>", r"\\w+", name) for name in explained()]
    return [name for name in names if not any(re.fullmatch(p, name) for p in patterns)]


def check_row(row: dict[str, float | None]) -> None:
    """The step was on policy, and its numbers are finite."""
    assert row["actor/first_log_ratio_max"] == 0.0
    assert row["actor/log_ratio_max"] > 0.0
    assert all(value is None or math.isfinite(value) for value in row.values())
