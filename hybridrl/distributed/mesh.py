"""Process groups and the training mesh: axes dp_replicate and dp_shard over all ranks that train.

A replica of the weights is on consecutive ranks; config/planner/world.py defines their order.
"""

import inspect
import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridrl.config.planner.world import ranks_by_shard
from hybridrl.config.schema import FSDPConfig
from hybridrl.distributed.torch_compat import group_named, joined_group, ranks_as_given

logger = logging.getLogger(__name__)

AXES = ("dp_replicate", "dp_shard")

# Time limit of collectives: none, as the driver ends a call without progress
# (cluster.stall_timeout_s). torch's own limit, 30 minutes or 10 with NCCL, would also end ranks
# that wait for a busy one. 31 bits hold at most 24 days of milliseconds.
NO_LIMIT = timedelta(days=24)
# Name of the group of all ranks, where some only train and others only sample.
EVERYONE = "hybridrl_everyone"


def init_groups(
    store: Store, rank: int, parts: Sequence[range], device: torch.device | None
) -> None:
    """Create the default group of this rank's part and, with several parts, that of all ranks.

    Parts are the ranks that share a default group: all, or those that train and those that sample.
    (vLLM makes its groups over all of the default group.) `store` is shared by all ranks, `rank`
    the number among them. `device` is the rank's GPU, already set.
    """
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    own = next(part for part in parts if rank in part)
    if len(parts) > 1:
        joined_group(EVERYONE, store, backend, rank, parts, NO_LIMIT, device)
        store = PrefixStore(f"ranks from {own.start}", store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank - own.start,
        world_size=len(own),
        timeout=NO_LIMIT,
        device_id=device,
    )


def everyone() -> ProcessGroup:
    """Return the group of all ranks, where some only train and others only sample."""
    return group_named(EVERYONE)


def build_mesh(fsdp: FSDPConfig, device_type: str) -> DeviceMesh:
    """Build the mesh of the sharding spec, with dp_shard resolved; a collective over all ranks.

    Position s of the dp_shard axis is rank s of its process group and holds shard s. For "cuda" the
    rank's device must have been set.
    """
    assert fsdp.dp_shard is not None, "fsdp.dp_shard is resolved before workers start"
    shape = (fsdp.dp_replicate, fsdp.dp_shard)
    plain = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    order = ranks_by_shard(fsdp)
    if order == list(range(fsdp.dp_shard)):
        return plain
    logger.info("shards of a copy of the weights lie on its ranks %s", order)
    # All replicas have one order of shards, so the groups over replicas do not change.
    ranks = torch.arange(plain.size()).view(shape)[:, order]
    groups = [new_group_in_order(row) for row in ranks.tolist()]
    mine = groups[dist.get_rank() // fsdp.dp_shard]
    return DeviceMesh.from_group(
        [plain.get_group("dp_replicate"), mine], device_type, ranks, mesh_dim_names=AXES
    )


def new_group_in_order(ranks: Sequence[int]) -> ProcessGroup:
    """Make a process group whose rank k is global rank ranks[k]; a collective over all ranks.

    FSDP2 assigns shards by the rank within the group, so a permuted DeviceMesh alone has no effect.
    NCCL's communicator has the same order. Ranks outside it get GroupMember.NON_GROUP_MEMBER.
    """
    wanted = list(ranks)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        group = dist.new_group(wanted, sort_ranks=False)
    else:
        with ranks_as_given():
            group = dist.new_group(wanted)
    if dist.get_rank() in wanted:
        assert dist.get_process_group_ranks(group) == wanted
        assert group.rank() == wanted.index(dist.get_rank())
    return group


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for `fully_shard`: both axes for hybrid sharding, else dp_shard alone.

    With a replicate axis of size 1, FSDP2 would all-reduce every gradient over one rank.
    """
    return mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
