"""Nodes of the cluster that this process has joined, with Ray's record of their resources."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray

from hybridrl.controller.placement import cpus_on_nodes
from hybridrl.controller.ray import compat
from hybridrl.controller.ray.node_probes import NodeIdentity


class FreeNode(NamedTuple):
    """Resources of a node.

    Attributes:
        node: address, and the first characters of Ray's NodeID.
        cpus, gpus: resources that Ray manages.
        free_cpus, free_gpus: those that no run holds.
    """

    node: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def free_nodes() -> list[FreeNode]:
    """Return the alive nodes, in the order of addresses."""
    free = compat.free_resources()
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has, left = node["Resources"], free.get(node["NodeID"], {})
        found.append(
            FreeNode(
                f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
                has.get("CPU", 0.0),
                has.get("GPU", 0.0),
                left.get("CPU", 0.0),
                left.get("GPU", 0.0),
            )
        )
    return sorted(found)


class RayNode(NamedTuple):
    """State of a node.

    Attributes:
        identity: host name, address and Ray's NodeID, shortened.
        node_id: the full NodeID.
        alive: True while it reports to the head.
        reason: the head's reason for a dead node.
        cpus, gpus: resources that Ray manages.
    """

    identity: NodeIdentity
    node_id: str
    alive: bool
    reason: str
    cpus: float = 0.0
    gpus: float = 0.0


def ray_nodes() -> list[RayNode]:
    """Return all nodes of the cluster, dead ones included; the driver's first."""
    driver = ray.get_runtime_context().get_node_id()
    found = [
        RayNode(
            NodeIdentity(
                node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"][:8]
            ),
            node["NodeID"],
            node["Alive"],
            node["DeathReasonMessage"] or "",
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
    ]
    return sorted(found, key=lambda node: (node.node_id != driver, node.identity))


def ranks_that_fit(
    nodes: Mapping[str, RayNode], wanted: Sequence[int], *, on_gpu: bool
) -> dict[str, int]:
    """Return the largest of the wanted numbers of ranks that fits on each node, or 0.

    A placement group would reserve the same resources.
    """
    cpus = cpus_on_nodes(wanted, [node.cpus for node in nodes.values()])
    requested = list(zip(wanted, cpus, strict=True))
    return {
        name: max(
            (
                slots
                for slots, share in requested
                if share <= node.cpus and (not on_gpu or slots <= node.gpus)
            ),
            default=0,
        )
        for name, node in nodes.items()
    }
