"""Input of the stages, calls of probes, and the run of the stages in their order.

Failures of nodes that the run does not need become warnings.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult, Resources, call_all
from hybridrl.doctor.findings import CHECKS, Finding, Stage, Verdict, fail, skipped, stage_of

MACHINE_TIMEOUT_S = 60.0
# Stages that examine each node as a place for ranks.
OF_NODES = (Stage.host, Stage.network, Stage.inputs, Stage.memory)
# Checks that the driver's node must pass even without ranks.
OF_DRIVER = ("host.shm", "host.limits", "host.temporary", "host.versions", "memory.host", "inputs.")

Gathered = tuple[dict[str, Any], list[Finding]]


@dataclass(frozen=True)
class CheckContext:
    """Input of every stage.

    Attributes:
        machine: nodes that the run may use.
        shape, frozen: sizes of the model, and of the reward model, if there is one.
        overrides: of the command line, for the last stage.
        quick: skip every check that takes seconds.
        config_dir: folder of the user's own config groups.
        unfit: nodes with a failure in an earlier stage that the run does not need.
    """

    config: RunConfig
    machine: Machine
    shape: ModelShape
    frozen: Frozen
    overrides: Sequence[str]
    agents: NodeProbes
    quick: bool
    config_dir: str | None = None
    unfit: frozenset[str] = frozenset()

    @property
    def on_gpu(self) -> bool:
        """Run with hardware=gpu."""
        return self.config.hardware.accelerator is Accelerator.gpu

    @cached_property
    def capacity(self) -> dict[str, int]:
        """Number of requested ranks that fit on each node: by Ray, or without Ray by its GPUs."""
        agents, wanted = self.agents, slots_on_nodes(self.config)
        none = dict.fromkeys(self.unfit, 0)
        if agents.resources is not None:
            return ranks_that_fit(agents.resources, wanted, on_gpu=self.on_gpu) | none
        if not self.on_gpu or len(set(wanted)) == 1:
            return dict.fromkeys(agents.nodes, max(wanted)) | none
        machines = call_all(agents, local_machine, timeout_s=MACHINE_TIMEOUT_S)
        capacity = {}
        for node, answer in machines.items():
            gpus = 0 if answer.error else len(answer.value.gpus)
            capacity[node] = max((slots for slots in wanted if slots <= gpus), default=0)
        return capacity | none

    @cached_property
    def slots(self) -> dict[str, int]:
        """Largest number of ranks that each node may get; 0: none."""
        return max_ranks(slots_on_nodes(self.config), self.capacity)


def ranks_that_fit(
    nodes: Mapping[str, Resources], wanted: Sequence[int], *, on_gpu: bool
) -> dict[str, int]:
    """Return the largest of the wanted numbers of ranks that fits on each node, or 0.

    A placement group would reserve the same resources.
    """
    from hybridrl.controller.placement import cpus_on_nodes  # imports Ray

    cpus = cpus_on_nodes(wanted, [node.cpus for node in nodes.values()])
    requested = list(zip(wanted, cpus, strict=True))
    ranks = {}
    for name, node in nodes.items():
        limit = node.gpus if on_gpu else float("inf")
        fitting = [slots for slots, share in requested if share <= node.cpus and slots <= limit]
        ranks[name] = max(fitting, default=0)
    return ranks


def fits(wanted: Iterable[float], capacity: Iterable[float]) -> bool:
    """Return True if the nodes can hold these ranks, largest demand on the largest node."""
    largest, demand = sorted(capacity, reverse=True), sorted(wanted, reverse=True)
    return len(largest) >= len(demand) and all(
        has >= slots for has, slots in zip(largest, demand, strict=False)
    )


def max_ranks(wanted: Sequence[int], capacity: Mapping[str, int]) -> dict[str, int]:
    """Return the largest number of ranks that each node may get, from those wanted on nodes.

    Ray chooses where several fit. If the ranks do not fit, the largest nodes get the most.
    """
    demand = sorted(wanted, reverse=True)
    if not fits(wanted, capacity.values()):
        largest = sorted(capacity, key=lambda node: -capacity[node])
        return dict.fromkeys(capacity, 0) | dict(zip(largest, demand, strict=False))
    ranks = dict.fromkeys(capacity, 0)
    for node in capacity:
        others = [has for other, has in capacity.items() if other != node]
        for index, slots in enumerate(demand):
            rest = demand[:index] + demand[index + 1 :]
            if slots <= capacity[node] and fits(rest, others):
                ranks[node] = slots
                break
    return ranks


@dataclass(frozen=True)
class ProbeGroup:
    """Nodes with given names, addresses and calls (`NodeProbes`)."""

    nodes: list[str]
    addresses: dict[str, str]
    call_each: Callable[..., dict[str, ProbeResult]]
    resources: Mapping[str, Resources] | None = None


def subset(agents: NodeProbes, nodes: Container[str]) -> NodeProbes:
    """Return the same probes for some nodes only."""
    kept = [node for node in agents.nodes if node in nodes]
    return ProbeGroup(kept, {node: agents.addresses[node] for node in kept}, agents.call_each)


def gather(
    agents: NodeProbes,
    check: str,
    probe: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 30.0,
) -> Gathered:
    """Call a probe with the same arguments on every node; return values and failures by node."""
    return gather_each(agents, check, probe, dict.fromkeys(agents.nodes, arguments), timeout_s)


def gather_each(
    agents: NodeProbes,
    check: str,
    probe: Callable[..., Any],
    arguments: Mapping[str, tuple[Any, ...]],
    timeout_s: float,
) -> Gathered:
    """Call a probe on the nodes that have arguments; return the same as `gather`."""
    answers = agents.call_each(probe, arguments, timeout_s)
    values = {node: answer.value for node, answer in answers.items() if not answer.error}
    advice = "Check that it is up and its disk is not full (ssh {0}); Ray's logs are in /tmp/ray"
    failures = [
        fail(check, node, f"the node does not answer: {answer.error}", advice.format(node))
        for node, answer in answers.items()
        if answer.error
    ]
    return values, failures


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
