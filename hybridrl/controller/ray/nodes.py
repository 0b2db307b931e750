"""What a Ray cluster can still grant, node by node."""

from typing import NamedTuple

import ray

from hybridrl.controller.ray import compat


class FreeNode(NamedTuple):
    """A node's slots: all that Ray was given, and those that nobody holds.

    Attributes:
        node: its address, with the beginning of Ray's NodeID.
        cpus, gpus: Ray's numbers for the node.
        free_cpus, free_gpus: of these, not held by a run.
    """

    node: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


def free_nodes() -> list[FreeNode]:
    """The alive nodes of the cluster that this process has joined, in the order of addresses."""
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
