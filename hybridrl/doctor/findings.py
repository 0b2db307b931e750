"""Ids of all checks, findings of the doctor, and the rules that make them.

docs/troubleshooting.md maps symptoms to the ids; the rules of each say what it measures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Stage(Enum):
    """Stages in their order; a stage runs only if the stages before it found no failure."""

    host = "host"
    network = "network"
    ray = "ray"
    placement = "placement"
    inputs = "inputs"
    memory = "memory"
    training = "training"


NAMES = {
    Stage.host: "shm limits cgroup gpus visible_devices variables allocator versions "
    "communication_variables clock temporary terminal",
    Stage.network: "address interfaces ports rendezvous bandwidth collective infiniband",
    Stage.ray: "version reachable loopback port token nodes",
    Stage.placement: "slots engines",
    Stage.inputs: "cache cache_contents model tokenizer data reward run_directory",
    Stage.memory: "gpu host",
    Stage.training: "steps",
}
CHECKS = tuple(f"{stage.value}.{name}" for stage, names in NAMES.items() for name in names.split())


def stage_of(check: str) -> Stage:
    """Return the stage of a check."""
    return Stage(check.partition(".")[0])


# Measurements by sender, receiver and unit.
Matrix = Mapping[str, Mapping[str, Mapping[str, float]]]


class Verdict(Enum):
    """Severity of a finding."""

    ok = "ok"
    warn = "warn"
    fail = "fail"
    skipped = "skipped"


# Severity (None: the rule does not apply), evidence, remedy.
Rule = tuple[Verdict | None, str, str]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        node: a node, "a -> b" for a pair, "all" for the cluster.
        evidence: measured values; of a skipped check, the reason.
        advice: remedy, with the command or setting to type; only of warn and fail.
        tables: measurements between pairs for the report, by title.
    """

    check: str
    node: str
    verdict: Verdict
    evidence: str
    advice: str = ""
    tables: Mapping[str, Matrix] | None = None

    def __post_init__(self) -> None:
        assert self.check in CHECKS, f"{self.check} is not in the catalog"
        needs_advice = self.verdict in (Verdict.warn, Verdict.fail)
        assert bool(self.advice) == needs_advice, f"{self.check}: advice goes with warn and fail"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for doctor.json, without the tables."""
        values = asdict(self) | {"verdict": self.verdict.value}
        del values["tables"]
        return values


def ok(check: str, node: str, evidence: str) -> Finding:
    """Return a finding of a check that passed."""
    return Finding(check, node, Verdict.ok, evidence)


def warn(check: str, node: str, evidence: str, advice: str) -> Finding:
    """Return a finding of a run that is possible, but slower or less safe."""
    return Finding(check, node, Verdict.warn, evidence, advice)


def fail(check: str, node: str, evidence: str, advice: str) -> Finding:
    """Return a finding of a run that would fail or hang."""
    return Finding(check, node, Verdict.fail, evidence, advice)


def skipped(check: str, node: str, why: str) -> Finding:
    """Return a finding of a check that was not made."""
    return Finding(check, node, Verdict.skipped, why)


def severity(fails: object, warns: object) -> Verdict | None:
    """Return the severity of a rule from its two conditions; None if neither holds."""
    return Verdict.fail if fails else Verdict.warn if warns else None


def fails_if(condition: object) -> Verdict | None:
    """Return the severity of a rule that fails."""
    return severity(condition, False)


def warns_if(condition: object) -> Verdict | None:
    """Return the severity of a rule that warns."""
    return severity(False, condition)


def apply(check: str, node: str, rules: Iterable[Rule], passed: str) -> list[Finding]:
    """Return a finding for each rule that applies, or one ok with evidence `passed`."""
    findings = [
        Finding(check, node, verdict, evidence, advice)
        for verdict, evidence, advice in rules
        if verdict is not None
    ]
    return findings or [ok(check, node, passed)]


def first(check: str, node: str, rules: Iterable[Rule], passed: str) -> Finding:
    """Return the finding of the first rule that applies, or ok with evidence `passed`."""
    return apply(check, node, rules, passed)[0]
