"""Failures of nodes that the run finds room without: they warn, and later stages do without these.

Which nodes the ranks come to is Ray's choice, so that a fault stays one to be told; but only where
too few nodes are left without those that have one would the run fail for certain.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybridrl.config.checks.sizes import slots_on_nodes
from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult
from hybridrl.doctor.catalog import Stage, stage_of
from hybridrl.doctor.demand import find_room
from hybridrl.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from hybridrl.doctor.stages import Case

# The stages that look at each node as a place for ranks.
OF_NODES = (Stage.host, Stage.network, Stage.inputs, Stage.memory)
# What the driver's node has to pass by itself, whether or not ranks come there.
OF_DRIVER = ("host.shm", "host.limits", "host.temporary", "host.versions", "memory.host", "inputs.")


class SomeAgents:
    """A part of the nodes.

    Args:
        agents: of all nodes.
        nodes: names of those to be left.
    """

    def __init__(self, agents: NodeProbes, nodes: Collection[str]) -> None:
        self._agents = agents
        self._nodes = [node for node in agents.nodes if node in nodes]

    @property
    def nodes(self) -> list[str]:
        """Their names, in the same order."""
        return self._nodes

    @property
    def addresses(self) -> dict[str, str]:
        """As all know them."""
        return {node: self._agents.addresses[node] for node in self._nodes}

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """As `NodeProbes.call_each`."""
        return self._agents.call_each(function, arguments, timeout_s)


def excuse(findings: Iterable[Finding], nodes: frozenset[str], case: "Case") -> list[Finding]:
    """The findings, with warnings in place of the failures of nodes that are `dispensable`."""
    return [_excused(f, nodes, case) if named(f, case) & nodes else f for f in findings]


def dispensable(findings: Iterable[Finding], case: "Case") -> frozenset[str]:
    """The nodes to which no rank comes, and those that fail if the run finds room without them."""
    idle = {node for node, slots in case.slots.items() if not slots}
    failing = cover([names for f in findings if (names := named(f, case)) and not names & idle])
    left = [room for node, room in case.rooms.items() if node not in failing]
    return frozenset(idle | failing if find_room(slots_on_nodes(case.config), left) else idle)


def named(finding: Finding, case: "Case") -> frozenset[str]:
    """The nodes one of which a failure would be gone without; none: it is not of that kind."""
    nodes = case.agents.nodes
    if finding.verdict is not Verdict.fail or stage_of(finding.check) not in OF_NODES:
        return frozenset()
    if finding.node == nodes[0] and finding.check.startswith(OF_DRIVER):
        return frozenset()
    if finding.node in nodes:
        return frozenset([finding.node])
    source, _, target = finding.node.partition(" -> ")
    return frozenset([source, target]) if {source, target} <= set(nodes) else frozenset()


def cover(failures: Iterable[frozenset[str]]) -> set[str]:
    """Nodes without which no failure is left, chosen by how many failures they are in.

    Args:
        failures: the one or two nodes of each.
    """
    left = list(failures)
    chosen = {node for names in left if len(names) == 1 for node in names}
    while left := [names for names in left if not names & chosen]:
        often = Counter(node for names in left for node in sorted(names))
        chosen.add(often.most_common(1)[0][0])
    return chosen


def _excused(finding: Finding, nodes: frozenset[str], case: "Case") -> Finding:
    names = sorted(named(finding, case) & nodes)
    if all(not case.slots[node] for node in names):
        evidence, advice = "no rank of the run comes here", finding.advice
    else:
        evidence = f"the run finds room without {' and '.join(names)}"
        advice = f"{finding.advice} Ray may choose it all the same: mend it, or `ray stop` there."
    return replace(
        finding,
        verdict=Verdict.warn,
        evidence=f"{finding.evidence}; {evidence}",
        advice=advice,
    )
