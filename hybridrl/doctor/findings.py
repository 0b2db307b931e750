"""What a check found: one verdict on one node, the evidence, and what to type."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hybridrl.doctor.catalog import CHECKS

# From one to another: what was measured, and the number.
Matrix = Mapping[str, Mapping[str, Mapping[str, float]]]


class Verdict(Enum):
    """How a check ended."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    skipped = "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: its id, from `CHECKS`.
        node: the node it is about, "a -> b" for a pair, "all" for the cluster as a whole.
        verdict: ok, warn, fail, or skipped.
        evidence: what was measured or seen; of a skipped check, why.
        advice: what to do, with the command or setting to type; of warn and fail never empty.
        tables: what was measured between each two, for the report, by title.
    """

    check: str
    node: str
    verdict: Verdict
    evidence: str
    advice: str = ""
    tables: Mapping[str, Matrix] | None = None

    def __post_init__(self) -> None:
        assert self.check in CHECKS, f"{self.check} is not in the catalog"
        asks = self.verdict in (Verdict.warn, Verdict.fail)
        assert bool(self.advice) == asks, f"{self.check}: advice goes with warn and fail alone"

    def as_json(self) -> dict[str, Any]:
        """Plain values, for doctor.json, but for the tables."""
        values = asdict(self) | {"verdict": self.verdict.value}
        del values["tables"]
        return values


def ok(check: str, node: str, evidence: str) -> Finding:
    """All is well."""
    return Finding(check, node, Verdict.ok, evidence)


def warn(check: str, node: str, evidence: str, advice: str) -> Finding:
    """The run may go on, slower or less safely."""
    return Finding(check, node, Verdict.warn, evidence, advice)


def fail(check: str, node: str, evidence: str, advice: str) -> Finding:
    """The run would fail or hang."""
    return Finding(check, node, Verdict.fail, evidence, advice)


def skipped(check: str, node: str, why: str) -> Finding:
    """The check could not be made, and why."""
    return Finding(check, node, Verdict.skipped, why)
