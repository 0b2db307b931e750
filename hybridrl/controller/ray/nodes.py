"""Nodes of the cluster that this process has joined, with Ray's record of their resources."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ray

from hybridrl.controller.placement import cpus_on_nodes
from hybridrl.controller.ray import compat
from hybridrl.controller.ray.node_probes import NodeIdentity


class FreeNode(NamedTuple):
    """Resources of a node that Ray manages, and those of them that no run holds."""

    node: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def free_nodes() -> list[FreeNode]:
    """Return the alive nodes, in the order of addresses."""
    free = compat.free_resources()
    return sorted(
        FreeNode(
            f"{node.identity.address} ({node.identity.unique})",
            node.cpus,
            node.gpus,
            free.get(node.node_id, {}).get("CPU", 0.0),
            free.get(node.node_id, {}).get("GPU", 0.0),
        )
        for node in ray_nodes()
        if node.alive
    )


class RayNode(NamedTuple):
    """Node and the resources that Ray manages; `identity` has a part of the NodeID.

    It is alive while it reports to the head.
    """

    identity: NodeIdentity
    node_id: str
    alive: bool
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
    found = {}
    for name, node in nodes.items():
        limit = node.gpus if on_gpu else float("inf")
        fitting = [slots for slots, share in requested if share <= node.cpus and slots <= limit]
        found[name] = max(fitting, default=0)
    return found
