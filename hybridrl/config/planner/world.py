"""World size of a run, its ranks per node, and the order of the shards of one copy of the weights.

A vLLM engine is `tensor_parallel_size` (tp) consecutive ranks. Rank (d, t), the t-th rank of the
d-th engine of its copy, needs slice t of every split weight. There are R = dp_shard / tp shards to
a slice. Rank (d, t) holds shard t * R + d, which lies inside its own slice:

    dp_shard 4, tp 2     rank 0    rank 1    rank 2    rank 3
    (engine, tp rank)    (0, 0)    (0, 1)    (1, 0)    (1, 1)
    needs                slice 0   slice 1   slice 0   slice 1
    holds, aligned       shard 0   shard 2   shard 1   shard 3
    holds, plain         shard 0   shard 1   shard 2   shard 3
"""

from dataclasses import replace

from hybridrl.config.choices import Layout, RolloutWeights
from hybridrl.config.schema import FSDPConfig, RunConfig


def slots_on_nodes(config: RunConfig) -> list[int]:
    """Return the ranks on each node, one process per GPU or CPU slot."""
    if config.placement.slots_on_nodes is not None:
        return config.placement.slots_on_nodes
    assert config.cluster.gpus_per_node is not None
    return [config.cluster.gpus_per_node] * config.cluster.nodes


def world_size(config: RunConfig) -> int:
    """Return the number of ranks, of both kinds."""
    return sum(slots_on_nodes(config))


def engine_ranks(config: RunConfig) -> int:
    """Return the number of ranks, the last ones, that only sample; 0: each rank trains, too."""
    return config.placement.rollout_gpus or 0


def sampling_ranks(config: RunConfig) -> int:
    """Return the number of ranks that sample, the last ones."""
    return engine_ranks(config) or world_size(config)


def training_ranks(config: RunConfig) -> int:
    """Return the number of ranks that train, the first ones."""
    return world_size(config) - engine_ranks(config)


def sampling_slots_on_nodes(config: RunConfig) -> list[int]:
    """Return the ranks on each node that sample; nodes without any are left out."""
    left, per_node = sampling_ranks(config), []
    for slots in reversed(slots_on_nodes(config)):
        per_node.append(min(slots, left))
        left -= per_node[-1]
    return [slots for slots in reversed(per_node) if slots]


def num_engines(config: RunConfig) -> int:
    """Return the number of rollout engines, at least 1."""
    return max(1, sampling_ranks(config) // config.rollout.tensor_parallel_size)


def rollout_weights(config: RunConfig) -> str:
    """Return 'bfloat16', or 'fp8': the weights that vLLM samples with."""
    rollout = config.rollout
    is_fp8 = rollout.weights is RolloutWeights.fp8
    return rollout.weights.value if is_fp8 else rollout.dtype.value


def world_text(config: RunConfig) -> str:
    """Return '8 ranks (cluster.nodes = 1 x cluster.gpus_per_node = 8)'."""
    cluster = config.cluster
    world = world_size(config)
    if config.placement.slots_on_nodes is not None:
        return f"{world} ranks (placement.slots_on_nodes = {config.placement.slots_on_nodes})"
    return (
        f"{world} rank{'s' if world != 1 else ''} (cluster.nodes = {cluster.nodes} x "
        f"cluster.gpus_per_node = {cluster.gpus_per_node})"
    )


def training_text(config: RunConfig) -> str:
    """Return `world_text`, or '3 of 4 ranks, which train (placement.rollout_gpus = 1 sample)'."""
    if not (sampling := engine_ranks(config)):
        return world_text(config)
    trainers = f"{training_ranks(config)} of {world_size(config)} ranks, which train"
    return f"{trainers} (placement.rollout_gpus = {sampling} sample)"


def sampling_text(config: RunConfig) -> str:
    """Return `world_text`, or 'placement.rollout_gpus = 1'."""
    sampling = engine_ranks(config)
    return f"placement.rollout_gpus = {sampling}" if sampling else world_text(config)


def data_shards(config: RunConfig) -> int:
    """Return the data-parallel size of training: ranks, or sequence-parallel groups."""
    return max(1, training_ranks(config) // config.fsdp.ulysses_size)


def part_mesh(fsdp: FSDPConfig, part: range) -> FSDPConfig:
    """Return the mesh of a part of the ranks: the spec's for the first, those that train.

    That of engines has no shards to order.
    """
    if part.start == 0:
        return fsdp
    return replace(fsdp, layout=Layout.plain, dp_replicate=1, dp_shard=len(part))


def is_nested(fsdp: FSDPConfig) -> bool:
    """Return whether shards lie inside tensor-parallel slices."""
    tp = fsdp.tensor_parallel_size
    return fsdp.layout is Layout.aligned and tp > 1 and fsdp.shards % tp == 0


def ranks_by_shard(fsdp: FSDPConfig) -> list[int]:
    """Return the ranks of the first copy of the weights, in the order of their shards."""
    if not is_nested(fsdp):
        return list(range(fsdp.shards))
    tp = fsdp.tensor_parallel_size
    per_slice = fsdp.shards // tp
    return [engine * tp + t for t in range(tp) for engine in range(per_slice)]
