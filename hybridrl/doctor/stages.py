"""The stages in their order, and what each of them is given."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.config.checks.sizes import slots_on_nodes
from hybridrl.config.load import Examined
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor import demand
from hybridrl.doctor.catalog import CHECKS, Stage, stage_of
from hybridrl.doctor.findings import Finding, Verdict, skipped
from hybridrl.doctor.spare import dispensable, excuse


@dataclass(frozen=True)
class Case:
    """What is examined.

    Attributes:
        config: the run's, checked and resolved.
        machine: what the run may use.
        shape: the model's sizes.
        reward_shape: the reward model's; None without one.
        overrides: the command line's, for the last stage.
        agents: the nodes.
        quick: only what takes a moment; a stage leaves the rest out, without a word.
        config_dir: the folder of the user's own groups, which the overrides choose from.
        unfit: nodes that failed in an earlier stage, and that the run finds room without.
    """

    config: RunConfig
    machine: Machine
    shape: ModelShape
    reward_shape: ModelShape | None
    overrides: Sequence[str]
    agents: NodeProbes
    quick: bool
    config_dir: str | None = None
    unfit: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        result: Examined,
        machine: Machine,
        overrides: Sequence[str],
        agents: NodeProbes,
        *,
        quick: bool,
        config_dir: str | None = None,
    ) -> "Case":
        """The case of a config that has passed its checks."""
        assert result.shape is not None
        return cls(
            config=result.config,
            machine=machine,
            shape=result.shape,
            reward_shape=result.reward_shape,
            overrides=overrides,
            agents=agents,
            quick=quick,
            config_dir=config_dir,
        )

    @cached_property
    def rooms(self) -> dict[str, int]:
        """How many ranks of those that the run wants of a node each node can take."""
        found = demand.rooms(self.agents, self.config)
        return found | dict.fromkeys(self.unfit, 0)

    @cached_property
    def slots(self) -> dict[str, int]:
        """The most ranks that each node may get; 0: none come there."""
        return demand.may_get(slots_on_nodes(self.config), self.rooms)


Check = Callable[[Case], list[Finding]]


@dataclass(frozen=True)
class StageReport:
    """What a stage found, and how long it took in seconds."""

    stage: Stage
    findings: list[Finding]
    seconds: float


def run_stages(
    case: Case,
    stages: Sequence[tuple[Stage, Check]],
    show: Callable[[Stage], None] = lambda stage: None,
) -> Iterator[StageReport]:
    """Run stages until one finds a failure; the checks of those after it are skipped.

    Failures of nodes that the run finds room without are warnings.

    Args:
        case: what is examined.
        stages: in their order.
        show: told of each stage before it begins.

    Yields:
        Each stage's report, when it is done.
    """
    broken: Stage | None = None
    for stage, check in stages:
        if broken is not None:
            yield left_out(stage, f"stage {broken.value} failed")
            continue
        start = time.perf_counter()
        show(stage)
        findings = check(case)
        assert all(stage_of(f.check) is stage for f in findings), f"{stage}: another stage's check"
        if any(f.verdict is Verdict.fail for f in findings):
            unfit = dispensable(findings, case)
            findings = excuse(findings, unfit, case)
            case = replace(case, unfit=case.unfit | unfit)
        yield StageReport(stage, findings, time.perf_counter() - start)
        if any(f.verdict is Verdict.fail for f in findings):
            broken = stage


def left_out(stage: Stage, why: str) -> StageReport:
    """The report of a stage that did not come to an end, its checks skipped."""
    findings = [skipped(check, "all", why) for check in CHECKS if stage_of(check) is stage]
    return StageReport(stage, findings, 0.0)


def exit_code(reports: Sequence[StageReport], *, strict: bool) -> int:
    """0 all well, 1 warnings and `strict`, 2 failures."""
    verdicts = {finding.verdict for report in reports for finding in report.findings}
    if Verdict.fail in verdicts:
        return 2
    return 1 if strict and Verdict.warn in verdicts else 0
