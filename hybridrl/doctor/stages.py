"""Runs the stages in their order, and reduces failures of nodes that the run does not need."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.doctor.context import CheckContext, fits
from hybridrl.doctor.findings import CHECKS, Finding, Stage, Verdict, skipped, stage_of

# Stages that examine each node as a place for ranks.
OF_NODES = (Stage.host, Stage.network, Stage.inputs, Stage.memory)
# Checks that the driver's node must pass even without ranks.
OF_DRIVER = ("host.shm", "host.limits", "host.temporary", "host.versions", "memory.host", "inputs.")

Check = Callable[[CheckContext], list[Finding]]


@dataclass(frozen=True)
class StageReport:
    """Findings of a stage, and its duration in seconds."""

    stage: Stage
    findings: list[Finding]
    seconds: float


def run_stages(
    context: CheckContext,
    stages: Sequence[tuple[Stage, Check]],
    show: Callable[[Stage], None] = lambda stage: None,
) -> Iterator[StageReport]:
    """Run stages until one finds a failure; yield a report of each, later ones as skipped.

    Failures of nodes that the run does not need become warnings. `show` is called before a stage.
    """
    failed: Stage | None = None
    for stage, check in stages:
        if failed is not None:
            yield left_out(stage, f"stage {failed.value} failed")
            continue
        start = time.perf_counter()
        show(stage)
        findings = check(context)
        assert all(stage_of(f.check) is stage for f in findings), f"{stage}: another stage's check"
        if any(f.verdict is Verdict.fail for f in findings):
            unfit = dispensable(findings, context)
            findings = [_reduced(f, _nodes_of(f, context) & unfit, context) for f in findings]
            context = replace(context, unfit=context.unfit | unfit)
        yield StageReport(stage, findings, time.perf_counter() - start)
        if any(f.verdict is Verdict.fail for f in findings):
            failed = stage


def left_out(stage: Stage, why: str) -> StageReport:
    """Return the report of a stage that did not run to its end."""
    findings = [skipped(check, "all", why) for check in CHECKS if stage_of(check) is stage]
    return StageReport(stage, findings, 0.0)


def exit_code(reports: Sequence[StageReport], *, strict: bool) -> int:
    """Return 2 with failures, 1 with warnings and `strict`, else 0."""
    verdicts = {finding.verdict for report in reports for finding in report.findings}
    if Verdict.fail in verdicts:
        return 2
    return 1 if strict and Verdict.warn in verdicts else 0


def dispensable(findings: Iterable[Finding], context: CheckContext) -> frozenset[str]:
    """Return the nodes without ranks, and those with failures if the others suffice."""
    idle = {node for node, slots in context.slots.items() if not slots}
    each = [_nodes_of(finding, context) for finding in findings]
    failing = cover([nodes for nodes in each if nodes and not nodes & idle])
    left = [has for node, has in context.capacity.items() if node not in failing]
    return frozenset(idle | failing if fits(slots_on_nodes(context.config), left) else idle)


def cover(failures: Iterable[frozenset[str]]) -> set[str]:
    """Return nodes that cover all failures (one or two nodes each), greedily by their number."""
    left = list(failures)
    chosen = {node for nodes in left if len(nodes) == 1 for node in nodes}
    while left := [nodes for nodes in left if not nodes & chosen]:
        counts = Counter(node for nodes in left for node in sorted(nodes))
        chosen.add(counts.most_common(1)[0][0])
    return chosen


def _nodes_of(finding: Finding, context: CheckContext) -> frozenset[str]:
    """Return the nodes of a failure that would vanish without one of them; none for others."""
    nodes = context.agents.nodes
    if finding.verdict is not Verdict.fail or stage_of(finding.check) not in OF_NODES:
        return frozenset()
    if finding.node == nodes[0] and finding.check.startswith(OF_DRIVER):
        return frozenset()
    named = frozenset(finding.node.split(" -> "))
    return named if named <= set(nodes) else frozenset()


def _reduced(finding: Finding, unfit: frozenset[str], context: CheckContext) -> Finding:
    """Return a warning in place of a failure of nodes that the run does not need."""
    if not unfit:
        return finding
    why, advice = f"the run fits without {' and '.join(sorted(unfit))}", finding.advice
    if any(context.slots[node] for node in unfit):
        advice += " Ray may still choose that node: repair it, or `ray stop` there."
    else:
        why = "no rank of the run is placed here"
    evidence = f"{finding.evidence}; {why}"
    return replace(finding, verdict=Verdict.warn, evidence=evidence, advice=advice)
