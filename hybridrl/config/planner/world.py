"""World size of a run, and its ranks per node."""

from hybridrl.config.schema import RunConfig


def slots_on_nodes(config: RunConfig) -> list[int]:
    """Return the ranks on each node, one process per GPU or CPU slot."""
    if config.placement.slots_on_nodes is not None:
        return config.placement.slots_on_nodes
    assert config.cluster.gpus_per_node is not None
    return [config.cluster.gpus_per_node] * config.cluster.nodes


def world_size(config: RunConfig) -> int:
    """Return the number of ranks."""
    return sum(slots_on_nodes(config))


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


def data_shards(config: RunConfig) -> int:
    """Return the data-parallel size of training: ranks, or sequence-parallel groups."""
    return max(1, world_size(config) // config.fsdp.ulysses_size)
