"""Which process is which rank: sorted by node and GPU, every rollout engine on one node."""

import ipaddress
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridrl.config.errors import ConfigError

logger = logging.getLogger(__name__)


class Slot(NamedTuple):
    """Where a worker process found itself.

    Attributes:
        node_id: Ray's NodeID; addresses may be shared by nodes.
        node_ip: the node's address.
        local_rank: GPU among those visible on the node, or number of the CPU slot.
    """

    node_id: str
    node_ip: str
    local_rank: int


def rank_order(slots: Sequence[Slot]) -> list[int]:
    """Positions in `slots` in the order of ranks: by node (address, then NodeID), then local rank.

    The same GPUs get the same ranks in every run, in whatever order processes came up.
    """
    return sorted(range(len(slots)), key=lambda position: _sort_key(slots[position]))


def _sort_key(slot: Slot) -> tuple[int, bytes, str, int]:
    address = ipaddress.ip_address(slot.node_ip)
    return address.version, address.packed, slot.node_id, slot.local_rank


def check_engines(slots: Sequence[Slot], ranks_per_engine: int) -> None:
    """Refuse a placement in which the ranks of a rollout engine lie on several nodes.

    Args:
        slots: by rank.
        ranks_per_engine: consecutive ranks that hold one copy of the rollout weights.

    Raises:
        ConfigError: naming the ranks and nodes of every engine that straddles.
    """
    problems = []
    for first in range(0, len(slots), ranks_per_engine):
        members = slots[first : first + ranks_per_engine]
        if len({slot.node_id for slot in members}) == 1:
            continue
        places = ", ".join(
            f"rank {first + k} on node {slot.node_id[:8]} ({slot.node_ip})"
            for k, slot in enumerate(members)
        )
        problems.append(
            f"rollout.tensor_parallel_size={ranks_per_engine}: engine "
            f"{first // ranks_per_engine} would straddle nodes: {places}.\n"
            "An engine's ranks exchange data in every layer and must lie on one node.\n"
            "Choose a tensor_parallel_size that divides cluster.gpus_per_node."
        )
    if problems:
        raise ConfigError(*problems)


def number_cpu_slots(slots: Sequence[Slot]) -> list[Slot]:
    """CPU slots have no number of their own: number them on each node, in the order given."""
    counts: dict[str, int] = defaultdict(int)
    numbered = []
    for slot in slots:
        numbered.append(slot._replace(local_rank=counts[slot.node_id]))
        counts[slot.node_id] += 1
    return numbered


def visible_index(gpu: str, visible: str | None) -> int:
    """Index of a GPU, as Ray names it, among those CUDA_VISIBLE_DEVICES leaves to the process.

    Workers see all GPUs of their node (with one each, vLLM's custom all-reduce fails).
    """
    return visible.split(",").index(gpu) if visible else int(gpu)


def reserve(nodes: int, slots_per_node: int, on_gpu: bool, timeout_s: float) -> PlacementGroup:
    """Reserve slots on exactly `nodes` different nodes, all or nothing.

    One bundle per node holds all its slots: `slots_per_node` processes go into each.

    Raises:
        ConfigError: the cluster does not have them, or not within `timeout_s` seconds.
    """
    bundle = {"CPU": _cpus_per_node(nodes, slots_per_node)}
    if on_gpu:
        bundle["GPU"] = float(slots_per_node)
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    has = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPUs, "
        f"{node['Resources'].get('GPU', 0):g} GPUs"
        for node in ray.nodes()
        if node["Alive"]
    )
    raise ConfigError(
        f"cluster.nodes={nodes} cluster.gpus_per_node={slots_per_node}: the Ray cluster did not "
        f"grant {nodes} x {bundle} within cluster.start_timeout_s={timeout_s:g} s.\n"
        f"It has {has}; another run may be using them.\n"
        "Set fewer nodes or gpus_per_node, or add nodes to the cluster."
    )


def _cpus_per_node(nodes: int, slots_per_node: int) -> float:
    """CPUs to reserve on each node: one a slot, or all where slots share cores."""
    cpus = sorted(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"])
    smallest = cpus[-nodes] if len(cpus) >= nodes else 0.0
    return max(min(float(slots_per_node), smallest), 0.01)
