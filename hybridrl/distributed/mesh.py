"""The training mesh: axes dp_replicate and dp_shard over all ranks.

A copy of the weights lies on consecutive ranks; config/planner/shard_order.py defines
their order in it.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridrl.config.planner.shard_order import ranks_by_shard
from hybridrl.config.schema import FSDPConfig

logger = logging.getLogger(__name__)

AXES = ("dp_replicate", "dp_shard")


def build_mesh(fsdp: FSDPConfig, device_type: str) -> DeviceMesh:
    """The mesh of the sharding spec; a collective over all ranks.

    Position s of the dp_shard axis, which is rank s of its process group, holds shard s.

    Args:
        fsdp: the spec, with dp_shard resolved; dp_replicate * dp_shard is the number of ranks.
        device_type: "cpu" or "cuda"; for "cuda" the rank's device must have been set.
    """
    assert fsdp.dp_shard is not None, "fsdp.dp_shard is resolved before workers start"
    shape = (fsdp.dp_replicate, fsdp.dp_shard)
    plain = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    order = ranks_by_shard(fsdp)
    if order == list(range(fsdp.dp_shard)):
        return plain
    logger.info("shards of a copy of the weights lie on its ranks %s", order)
    # Copies hold their shards in one order, so that the groups over copies are as they were.
    ranks = torch.arange(plain.size()).view(shape)[:, order]
    groups = [new_group_in_order(row) for row in ranks.tolist()]
    mine = groups[dist.get_rank() // fsdp.dp_shard]
    return DeviceMesh.from_group(
        [plain.get_group("dp_replicate"), mine], device_type, ranks, mesh_dim_names=AXES
    )


def new_group_in_order(ranks: Sequence[int]) -> ProcessGroup:
    """A process group whose rank k is global rank ranks[k]; a collective over all ranks.

    FSDP2 deals shards by the rank within the group, so a permuted DeviceMesh alone changes
    nothing. NCCL's communicator follows, because it is made, or split off the default one, with
    the rank in the group as its key.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER on ranks outside it.
    """
    wanted = list(ranks)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        group = dist.new_group(wanted, sort_ranks=False)
    else:
        with ranks_as_given():
            group = dist.new_group(wanted)
    if dist.get_rank() in wanted:
        assert dist.get_process_group_ranks(group) == wanted
        assert dist.get_rank(group) == group.rank() == wanted.index(dist.get_rank())
    return group


@contextmanager
def ranks_as_given() -> Iterator[None]:
    """Keep torch from sorting the ranks of groups made in here.

    torch < 2.13 sorts them always; that is the only thing it sorts when it makes a group, so its
    module is given a `sorted` of its own that does not.
    """
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


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
