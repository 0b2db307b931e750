"""Order of the shards of one copy of the weights over its ranks.

A vLLM engine is `tensor_parallel_size` (tp) consecutive ranks. Rank (d, t), the t-th rank of the
d-th engine of its copy, needs slice t of every split weight. There are R = dp_shard / tp shards to
a slice; rank (d, t) holds shard t * R + d, so that its shard lies inside its own slice:

    dp_shard 4, tp 2     rank 0    rank 1    rank 2    rank 3
    (engine, tp rank)    (0, 0)    (0, 1)    (1, 0)    (1, 1)
    needs                slice 0   slice 1   slice 0   slice 1
    holds, aligned       shard 0   shard 2   shard 1   shard 3
    holds, plain         shard 0   shard 1   shard 2   shard 3
"""

from hybridrl.config.choices import Layout
from hybridrl.config.schema import FSDPConfig


def is_nested(fsdp: FSDPConfig) -> bool:
    """Return whether shards lie inside tensor-parallel slices."""
    assert fsdp.dp_shard is not None
    tp = fsdp.tensor_parallel_size
    return fsdp.layout is Layout.aligned and tp > 1 and fsdp.dp_shard % tp == 0


def ranks_by_shard(fsdp: FSDPConfig) -> list[int]:
    """Return the ranks of the first copy of the weights, in the order of their shards."""
    assert fsdp.dp_shard is not None
    if not is_nested(fsdp):
        return list(range(fsdp.dp_shard))
    tp = fsdp.tensor_parallel_size
    per_slice = fsdp.dp_shard // tp
    return [engine * tp + t for t in range(tp) for engine in range(per_slice)]
