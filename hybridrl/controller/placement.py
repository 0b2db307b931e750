"""Ranks of processes, sorted by node and GPU, and the reservation of their slots."""

import ipaddress
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridrl.config.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
LOG_TAIL_LINES = 25


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


class Host(NamedTuple):
    """Process of one rank, as known to the driver."""

    rank: int
    handle: ActorHandle
    slot: Slot
    pid: int
    node_name: str
    log_file: Path

    def describe(self) -> str:
        """Describe rank, node and process; Ray's id distinguishes nodes with one host name."""
        node = f"{self.node_name} ({self.slot.node_ip}, node {self.slot.node_id[:8]})"
        return f"rank {self.rank} on {node}, slot {self.slot.local_rank}, pid {self.pid}"

    def log_tail(self) -> str:
        """Return the last lines of its log, with a final newline; empty if not on this node."""
        if not self.log_file.is_file():
            return ""
        lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "".join(f"  | {line}\n" for line in lines)
        return f"Last lines of rank {self.rank}'s log:\n{tail}"


def by_node(hosts: Sequence[Host]) -> dict[str, list[Host]]:
    """Group ranks by the id of their node."""
    nodes: dict[str, list[Host]] = defaultdict(list)
    for host in hosts:
        nodes[host.slot.node_id].append(host)
    return nodes


def rank_order(slots: Sequence[Slot]) -> list[int]:
    """Return indices into `slots`, sorted by address, NodeID and local rank.

    The same GPUs get the same ranks in every run, independent of the start order of processes.
    """

    def key(position: int) -> tuple[int, bytes, str, int]:
        slot = slots[position]
        address = ipaddress.ip_address(slot.node_ip)
        return address.version, address.packed, slot.node_id, slot.local_rank

    return sorted(range(len(slots)), key=key)


def straddling_engines(slots: Sequence[Slot], ranks_per_engine: int) -> list[int]:
    """Return the rollout engines, of consecutive ranks, with ranks on several nodes."""
    nodes = [slot.node_id for slot in slots]
    firsts = range(0, len(nodes) - ranks_per_engine + 1, ranks_per_engine)
    engines = [{*nodes[first : first + ranks_per_engine]} for first in firsts]
    return [engine for engine, of_engine in enumerate(engines) if len(of_engine) > 1]


def warn_of_straddling(slots: Sequence[Slot], ranks_per_engine: int, first: int = 0) -> None:
    """Warn of `straddling_engines`, which the checks of the config permit or refuse.

    `first` is the rank of the first slot.
    """
    for engine in straddling_engines(slots, ranks_per_engine):
        places = ", ".join(
            f"rank {first + rank} on node {slots[rank].node_id[:8]} ({slots[rank].node_ip})"
            for rank in range(engine * ranks_per_engine, (engine + 1) * ranks_per_engine)
        )
        logger.warning(
            "rollout engine %d straddles nodes: %s (placement.allow_straddle). Its ranks exchange "
            "data in every layer, so it samples slowly",
            engine,
            places,
        )


def number_cpu_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Number the CPU slots of each node, in the order given."""
    counts: Counter[str] = Counter()
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

    Each node has one bundle for all its slots, in the order given. `check` is called every second
    while waiting, and may raise.

    Raises:
        ConfigError: the cluster granted no reservation within `timeout_s` seconds.
    """
    alive = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    bundles = [{"CPU": count} for count in cpus_on_nodes(slots_on_nodes, alive)]
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

    `cpus` are those of each of the cluster's nodes.
    """
    largest = sorted(cpus, reverse=True)
    nodes = len(slots_on_nodes)
    smallest = largest[nodes - 1] if len(largest) >= nodes else 0.0
    return [max(min(float(slots), smallest), 0.01) for slots in slots_on_nodes]
