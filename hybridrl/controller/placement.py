"""Ranks of processes, sorted by node and GPU, and the reservation of their slots."""

import ipaddress
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridrl.config.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0


class Slot(NamedTuple):
    """Place of a worker process.

    Attributes:
        node_id: Ray's NodeID; nodes may share an address.
        node_ip: the node's address.
        local_rank: index among the node's visible GPUs, or number of the CPU slot.
    """

    node_id: str
    node_ip: str
    local_rank: int


def rank_order(slots: Sequence[Slot]) -> list[int]:
    """Return indices into `slots`, sorted by address, NodeID and local rank.

    The same GPUs get the same ranks in every run, independent of the start order of processes.
    """
    return sorted(range(len(slots)), key=lambda position: _sort_key(slots[position]))


def _sort_key(slot: Slot) -> tuple[int, bytes, str, int]:
    address = ipaddress.ip_address(slot.node_ip)
    return address.version, address.packed, slot.node_id, slot.local_rank


def straddling_engines(slots: Sequence[Slot], ranks_per_engine: int) -> list[int]:
    """Return the rollout engines with ranks on several nodes.

    Args:
        slots: by rank.
        ranks_per_engine: consecutive ranks that hold one copy of the rollout weights.
    """
    engines = range(len(slots) // ranks_per_engine)
    return [
        k for k in engines if len({s.node_id for s in _members(slots, k, ranks_per_engine)}) > 1
    ]


def check_engines(
    slots: Sequence[Slot], ranks_per_engine: int, *, allow_straddle: bool = False
) -> None:
    """Check that each rollout engine has all its ranks on one node.

    Args:
        slots: by rank.
        ranks_per_engine: consecutive ranks that hold one copy of the rollout weights.
        allow_straddle: warn instead.

    Raises:
        ConfigError: an engine straddles nodes; lists ranks and nodes of each such engine.
    """
    problems = []
    for engine in straddling_engines(slots, ranks_per_engine):
        places = ", ".join(
            f"rank {engine * ranks_per_engine + k} on node {slot.node_id[:8]} ({slot.node_ip})"
            for k, slot in enumerate(_members(slots, engine, ranks_per_engine))
        )
        if allow_straddle:
            logger.warning(
                "rollout engine %d straddles nodes, which placement.allow_straddle allows: %s. Its "
                "ranks exchange data in every layer, so it samples slowly",
                engine,
                places,
            )
            continue
        problems.append(
            f"rollout.tensor_parallel_size={ranks_per_engine}: engine {engine} would straddle "
            f"nodes: {places}.\n"
            "An engine's ranks exchange data in every layer and must lie on one node.\n"
            "Choose a tensor_parallel_size that divides the ranks of every node, or set "
            "placement.allow_straddle=true, which is slow."
        )
    if problems:
        raise ConfigError(*problems)


def _members(slots: Sequence[Slot], engine: int, ranks_per_engine: int) -> Sequence[Slot]:
    return slots[engine * ranks_per_engine : (engine + 1) * ranks_per_engine]


def number_cpu_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Number the CPU slots of each node, in the order given."""
    counts: dict[str, int] = defaultdict(int)
    numbered = []
    for slot in slots:
        numbered.append(slot._replace(local_rank=counts[slot.node_id]))
        counts[slot.node_id] += 1
    return numbered


def visible_index(gpu: str, visible: str | None) -> int:
    """Return the index of Ray's GPU id among those of CUDA_VISIBLE_DEVICES.

    Workers see all GPUs of their node: with one each, vLLM's custom all-reduce fails.
    """
    return visible.split(",").index(gpu) if visible else int(gpu)


def reserve(
    slots_on_nodes: Sequence[int], on_gpu: bool, timeout_s: float, check: Callable[[], None]
) -> PlacementGroup:
    """Reserve slots on as many different nodes as there are counts, all or nothing.

    Each node has one bundle for all its slots, in the order given.

    Args:
        slots_on_nodes: number of slots per node.
        on_gpu: reserve GPUs.
        timeout_s: seconds to wait.
        check: called every second while waiting; may raise.

    Raises:
        ConfigError: the cluster granted no reservation within `timeout_s` seconds.
    """
    alive = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    cpus = cpus_on_nodes(slots_on_nodes, alive)
    bundles = [{"CPU": count} for count in cpus]
    if on_gpu:
        for bundle, slots in zip(bundles, slots_on_nodes, strict=True):
            bundle["GPU"] = float(slots)
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if group.wait(min(timeout_s, CHECK_EVERY_S)):
            return group
        check()
    remove_placement_group(group)
    has = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPUs, "
        f"{node['Resources'].get('GPU', 0):g} GPUs"
        for node in ray.nodes()
        if node["Alive"]
    )
    raise ConfigError(
        f"{len(slots_on_nodes)} node(s) with {', '.join(map(str, slots_on_nodes))} ranks: the Ray "
        f"cluster did not grant {bundles} within cluster.start_timeout_s={timeout_s:g} s.\n"
        f"It has {has}; another run may be using them.\n"
        "Set fewer cluster.nodes or cluster.gpus_per_node, or add nodes to the cluster."
    )


def cpus_on_nodes(slots_on_nodes: Sequence[int], cpus: Iterable[float]) -> list[float]:
    """Compute the CPUs to reserve on each node: one per slot, or all if slots share cores.

    Args:
        slots_on_nodes: number of slots per node.
        cpus: CPUs of each of the cluster's nodes.
    """
    largest = sorted(cpus, reverse=True)
    nodes = len(slots_on_nodes)
    smallest = largest[nodes - 1] if len(largest) >= nodes else 0.0
    return [max(min(float(slots), smallest), 0.01) for slots in slots_on_nodes]
