"""Creation of a pool's processes: Ray actors on reserved slots, and their ranks."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.config.choices import Accelerator
from hybridrl.config.schema import ClusterConfig, FSDPConfig
from hybridrl.controller.host import HostConfig, HostInfo, WorkerHost
from hybridrl.controller.placement import Host, number_cpu_slots, rank_order


@dataclass(frozen=True)
class PoolConfig:
    """Config of a pool.

    Attributes:
        slots_on_nodes: number of processes on each node.
        allow_straddle: permit engines on several nodes.
        ranks_per_engine: consecutive ranks that must share a node.
        modules: modules that every process imports first.
        ahead: configs of roles; their slow modules are imported during the rendezvous.
        log_folder: folder of the logs, one file per process.
    """

    cluster: ClusterConfig
    slots_on_nodes: Sequence[int]
    allow_straddle: bool
    accelerator: Accelerator
    fsdp: FSDPConfig
    ranks_per_engine: int
    modules: Sequence[str]
    ahead: Sequence[Any]
    log_folder: Path


def spawn(config: PoolConfig, reservation: PlacementGroup) -> list[ActorHandle]:
    """Create one process per slot; they start in the background."""
    host_config = HostConfig(
        accelerator=config.accelerator,
        slots_on_node=0,
        log_folder=str(config.log_folder.resolve()),
        import_path=tuple(sys.path),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        cluster=config.cluster,
    )
    actor = ray.remote(WorkerHost)
    bundles = zip(reservation.bundle_specs, config.slots_on_nodes, strict=True)
    return [
        actor.options(
            num_cpus=bundle["CPU"] / slots,
            num_gpus=1 if "GPU" in bundle else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation, index),
        ).remote(replace(host_config, slots_on_node=slots))
        for index, (bundle, slots) in enumerate(bundles)
        for _ in range(slots)
    ]


def ranked_hosts(
    config: PoolConfig, handles: Sequence[ActorHandle], infos: Sequence[HostInfo]
) -> list[Host]:
    """Return the processes in the order of their ranks."""
    slots = [info.slot for info in infos]
    if config.accelerator is Accelerator.cpu:
        slots = number_cpu_slots(slots)
    folder = config.log_folder.resolve()
    hosts = []
    for rank, k in enumerate(rank_order(slots)):
        name = infos[k].node_name
        log_file = folder / f"{name}_rank{rank}.log"
        hosts.append(Host(rank, handles[k], slots[k], infos[k].pid, name, log_file))
    return hosts
