"""Calls of a probe on nodes; a node without an answer is a failure of the check."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult
from hybridrl.doctor.findings import Finding, fail

Gathered = tuple[dict[str, Any], list[Finding]]


@dataclass(frozen=True)
class ProbeGroup:
    """Nodes with given names, addresses and calls (`NodeProbes`)."""

    nodes: list[str]
    addresses: dict[str, str]
    call_each: Callable[..., dict[str, ProbeResult]]


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
    """Call a probe with the same arguments on every node.

    Returns:
        The values by node, and a failure of `check` for each node without one.
    """
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
    failures = [
        fail(
            check,
            node,
            f"the node does not answer: {answer.error}",
            f"Check that {node} is up and its disk is not full (ssh {node}), and read the log of "
            "its process: Ray's are in /tmp/ray/session_latest/logs",
        )
        for node, answer in answers.items()
        if answer.error
    ]
    return values, failures
