"""The training mesh: axes dp_replicate and dp_shard over all ranks, row-major."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridrl.config.schema import FSDPConfig

AXES = ("dp_replicate", "dp_shard")


def build_mesh(fsdp: FSDPConfig, device_type: str) -> DeviceMesh:
    """The mesh of the sharding spec; a collective over all ranks.

    Args:
        fsdp: the spec, with dp_shard resolved; dp_replicate * dp_shard is the number of ranks.
        device_type: "cpu" or "cuda"; for "cuda" the rank's device must have been set.
    """
    assert fsdp.dp_shard is not None, "fsdp.dp_shard is resolved before workers start"
    return init_device_mesh(device_type, (fsdp.dp_replicate, fsdp.dp_shard), mesh_dim_names=AXES)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What `fully_shard` takes: both axes for hybrid sharding, dp_shard alone for one replica.

    With a replicate axis of size 1, FSDP2 would all-reduce every gradient over one rank.
    """
    return mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
