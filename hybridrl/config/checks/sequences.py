"""Whether ranks can share sequences (distributed/forward/sequence_parallel.py) as config asks."""

from collections.abc import Iterator

from hybridrl.config.checks.sizes import divisors, listed
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import RunConfig


def sequence_problems(config: RunConfig) -> Iterator[str]:
    """Whether every copy of the weights is computed by whole groups.

    A dp_shard that could not be resolved is null here, and reported elsewhere.
    """
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.dp_shard
    if dp_shard is not None and dp_shard % size:
        yield (
            f"fsdp.ulysses_size = {size} does not divide fsdp.dp_shard = {dp_shard}: ranks that "
            f"share sequences lie in one copy of the weights.\n"
            f"Set fsdp.ulysses_size to one of {listed(divisors(dp_shard))}."
        )


def sequence_head_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Whether attention can be dealt to the ranks of a group by heads."""
    size, dp_shard = config.fsdp.ulysses_size, config.fsdp.dp_shard
    if dp_shard is None or deals_heads(size, shape):
        return
    wrong = [] if shape.heads % size == 0 else [f"{shape.heads} attention heads"]
    if shape.kv_heads % size and size % shape.kv_heads:
        wrong.append(f"{shape.kv_heads} KV heads (nor they it)")
    fitting = [n for n in divisors(dp_shard) if deals_heads(n, shape)]
    yield (
        f"fsdp.ulysses_size = {size} does not divide the model's {', '.join(wrong)}: in attention "
        f"ranks that share a sequence have equally many heads of it.\n"
        f"Set fsdp.ulysses_size to one of {listed(fitting)}."
    )


def deals_heads(size: int, shape: ModelShape) -> bool:
    """Whether a model's attention heads can be dealt to groups of `size` ranks."""
    kv = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv and shape.heads % size == 0
