"""Checks of sequence parallelism (distributed/forward/sequence_parallel.py)."""

from collections.abc import Iterator

from hybridrl.config.checks.sizes import divisors, listed
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import RunConfig


def sequence_problems(config: RunConfig) -> Iterator[str]:
    """Check that whole sequence-parallel groups share a copy of the weights.

    An unresolved dp_shard is None here; its problem is reported elsewhere.
    """
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.dp_shard
    if dp_shard is not None and dp_shard % size:
        yield (
            f"fsdp.ulysses_size = {size} does not divide fsdp.dp_shard = {dp_shard}: the ranks of "
            f"a sequence-parallel group hold shards of one copy of the weights.\n"
            f"Set fsdp.ulysses_size to one of {listed(divisors(dp_shard))}."
        )


def sequence_head_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Check that the attention heads divide over the ranks of a group."""
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.dp_shard
    if dp_shard is None or splits_heads(size, shape):
        return
    wrong = [] if shape.heads % size == 0 else [f"{shape.heads} attention heads"]
    if shape.kv_heads % size and size % shape.kv_heads:
        wrong.append(f"{shape.kv_heads} KV heads (nor the other way round)")
    fitting = [n for n in divisors(dp_shard) if splits_heads(n, shape)]
    yield (
        f"fsdp.ulysses_size = {size} does not divide the model's {', '.join(wrong)}: in attention "
        f"each rank of a sequence-parallel group computes the same number of heads.\n"
        f"Set fsdp.ulysses_size to one of {listed(fitting)}."
    )


def splits_heads(size: int, shape: ModelShape) -> bool:
    """Return whether a model's attention heads divide over groups of `size` ranks."""
    kv = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv and shape.heads % size == 0
