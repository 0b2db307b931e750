"""A run of its own process: python -m tests.support.controller_run FOLDER MODE.

Says when it starts, prints Ray's folder once a call is about to be made, then is interrupted,
fails or succeeds.
"""

import sys
from pathlib import Path

import ray

from hybridrl.config.choices import (
    Accelerator,
    Accumulation,
    DType,
    Layout,
    NVLinkMulticast,
    Offload,
)
from hybridrl.config.schema import ClusterConfig, FSDPConfig
from hybridrl.controller.pool import Pool, PoolConfig
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.signals import Interrupted
from hybridrl.controller.worker_group import build_roles
from tests.support.controller_roles import AdderConfig, Numbers


def pool_config(
    folder: Path,
    *,
    nodes: int = 1,
    stall_s=0.0,
    engine: int = 1,
    multicast: NVLinkMulticast = NVLinkMulticast.auto,
):
    """Two slots on each node."""
    return PoolConfig(
        cluster=ClusterConfig(
            nodes=nodes,
            gpus_per_node=2,
            gpu_memory_gb=None,
            rendezvous_ports=[29500, 29599],
            start_timeout_s=120.0,
            stall_timeout_s=stall_s,
            nvlink_multicast=multicast,
        ),
        slots_on_nodes=[2] * nodes,
        accelerator=Accelerator.cpu,
        fsdp=FSDPConfig(
            dp_shard=2,
            dp_replicate=nodes,
            reshard_after_forward=True,
            param_dtype=DType.float32,
            reduce_dtype=DType.float32,
            activation_checkpointing=False,
            accumulation=Accumulation.full,
            layout=Layout.aligned,
            tensor_parallel_size=engine,
            columns=None,
            ulysses_size=1,
            offload=Offload.none,
            compile=False,
            share_prefixes=False,
            exact=False,
        ),
        modules=["tests.support.controller_roles"],
        ahead=[AdderConfig(ahead="tests.support.controller_ahead")],
        log_folder=folder / "logs",
    )


def run(folder: Path, mode: str) -> None:
    """One pool with one role, whose rank 1 sleeps, raises, or does neither."""
    config = pool_config(folder)
    if mode == "hang on two nodes":  # which are looked at all the time
        config = pool_config(folder, nodes=2, stall_s=300.0)
    print("starting", flush=True)
    with ray_runtime(config.cluster, config.accelerator), Pool(config).join() as pool:
        memory = f"/dev/shm/hybridrl_test_{folder.name}"
        group = build_roles(pool, {"adder": AdderConfig(shared_memory=memory)})["adder"]
        node = ray._private.worker._global_node
        print(Path(node.temp_dir).parent, flush=True)
        if mode == "succeed":
            assert group.call("add", Numbers([1]), 1) == Numbers([2])
        else:
            group.call("fail_in_collective", 1, mode)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), sys.argv[2])
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.signum)
