"""The names that docs/metrics.md explains, as patterns."""

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
