"""Advice for a run that does not fit into GPU memory: settings, or more GPUs.

Every candidate is set in a copy of the config, whose memory is predicted again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

from hybridrl.config.checks.sizes import engine_problems, tensor_parallel_problems
from hybridrl.config.choices import Accumulation, Offload
from hybridrl.config.planner.memory import BYTES, Phase, gib, rank_phases
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import world_size
from hybridrl.config.schema import RunConfig

# GPUs of a full node, and of the largest run.
NODE_GPUS, MOST_GPUS = 8, 1024
OFFLOADS = (Offload.none, Offload.idle_optimizer, Offload.idle_all)


class Change(NamedTuple):
    """A setting to try."""

    key: str
    value: Any

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value}"


class MemoryCase(NamedTuple):
    """Inputs of a memory prediction, and its limits.

    Attributes:
        config: resolved.
        shape, reward_shape: of the model and the reward model, if there is one.
        gpu_bytes: memory of the smallest GPU.
        host_fits: returns whether a config fits into the nodes' RAM.
    """

    config: RunConfig
    shape: ModelShape
    reward_shape: ModelShape | None
    gpu_bytes: int
    host_fits: Callable[[RunConfig], bool]

    def phases(self, *changes: Change) -> list[Phase]:
        """Predict memory by phase with these settings."""
        return self.phases_of(with_changes(self.config, changes))

    def phases_of(self, config: RunConfig) -> list[Phase]:
        """Predict memory by phase of another config."""
        return rank_phases(config, self.shape, self.gpu_bytes, self.reward_shape)

    def fits(self, *changes: Change) -> bool:
        """Return whether the run fits with these settings."""
        changed = with_changes(self.config, changes)
        return (
            peak(self.phases_of(changed)) <= self.gpu_bytes
            and not any(engine_problems(changed))
            and not any(tensor_parallel_problems(changed, self.shape))
            and _vllm_fits(changed, self.shape, self.gpu_bytes)
            and self.host_fits(changed)
        )


def peak(phases: list[Phase]) -> int:
    """Return the memory of the largest phase."""
    return max(phase.total for phase in phases)


def advice(case: MemoryCase, worst: Phase) -> str:
    """List what each setting saves in the worst phase, and the first that fit together."""
    saved = []
    for change in _memory_changes(case.config):
        then = next(phase for phase in case.phases(change) if phase.name == worst.name)
        if then.total < worst.total:
            saved.append(f"{change} {gib(worst.total - then.total)}")
    lines = [f"Alone these save in {worst.name}: {', '.join(saved)}."] if saved else []
    found = _first_that_fit(case)
    if found is not None:
        return "\n".join([*lines, f"Set {_listed(case, found)}."])
    world = world_size(case.config)
    lines.append(f"No settings make it fit {world} GPUs.")
    for larger in _more_gpus(case):
        found = _first_that_fit(larger)
        if found is not None:
            settings = _listed(larger, found, _cluster_changes(case.config, larger.config))
            return "\n".join([*lines, f"It fits {world_size(larger.config)}: set {settings}."])
    return "\n".join([*lines, "Set a smaller model.path, or train adapters (lora=default)."])


def _cluster_changes(config: RunConfig, larger: RunConfig) -> list[Change]:
    """List the settings that make a run as large as another."""
    before, after = config.cluster, larger.cluster
    on = []
    if before.nodes != after.nodes:
        on.append(Change("cluster.nodes", after.nodes))
    if before.gpus_per_node != after.gpus_per_node:
        on.append(Change("cluster.gpus_per_node", after.gpus_per_node))
    if config.placement.slots_on_nodes is not None:
        on.append(Change("placement.slots_on_nodes", "null"))
    return on


def with_changes(config: RunConfig, changes: tuple[Change, ...]) -> RunConfig:
    """Copy a config with other settings, links to them included."""
    for change in changes:
        section, name = change.key.split(".")
        values = {name: change.value}
        config = replace(config, **{section: replace(getattr(config, section), **values)})
        if change.key == "rollout.tensor_parallel_size":
            fsdp = replace(config.fsdp, tensor_parallel_size=change.value)
            config = replace(config, fsdp=fsdp)
    return config


def _memory_changes(config: RunConfig) -> list[Change]:
    """List settings that trade time for memory, cheapest first."""
    fsdp = config.fsdp
    found = []
    if fsdp.accumulation is Accumulation.full:
        found.append(Change("fsdp.accumulation", Accumulation.sharded))
    if not fsdp.activation_checkpointing:
        found.append(Change("fsdp.activation_checkpointing", True))
    if not fsdp.reshard_after_forward:
        found.append(Change("fsdp.reshard_after_forward", True))
    stronger = OFFLOADS[OFFLOADS.index(fsdp.offload) + 1 :]
    return [*found, *(Change("fsdp.offload", value) for value in stronger)]


def _rollout_changes(config: RunConfig) -> list[Change]:
    """List larger engines, and other shares of the GPU for them; nearest first."""
    tp, share = config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization
    sizes = [tp * 2**power for power in range(1, 4)]
    shares = [tenths / 10 for tenths in range(2, 10)]
    return [
        *(Change("rollout.tensor_parallel_size", size) for size in sizes),
        *(
            Change("rollout.gpu_memory_utilization", other)
            for other in sorted(shares, key=lambda other: abs(other - share))
            if other != share
        ),
    ]


def _batch_changes(config: RunConfig) -> list[Change]:
    """List smaller micro-batches, down to one sequence."""
    rollout, tokens = config.rollout, config.actor.max_tokens_per_gpu
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // config.fsdp.ulysses_size)
    halves = (tokens // 2**power for power in range(1, 6))
    return [Change("actor.max_tokens_per_gpu", half) for half in halves if half >= least]


def _first_that_fit(case: MemoryCase) -> list[Change] | None:
    """Find the fewest settings that fit; smaller micro-batches only if necessary."""
    rollout = [[], *([change] for change in _rollout_changes(case.config))]
    memory = list(_alternatives(_memory_changes(case.config)))
    for batch in _alternatives(_batch_changes(case.config)):
        pairs = sorted(product(memory, rollout), key=lambda pair: len(pair[0]) + len(pair[1]))
        for first, second in pairs:
            changes = [*first, *second, *batch]
            if case.fits(*changes):
                return changes
    return None


def _alternatives(changes: list[Change]) -> Iterator[list[Change]]:
    """Yield every choice of at most one value for each key, fewest and cheapest first."""
    by_key: dict[str, list[list[Change]]] = {}
    for change in changes:
        by_key.setdefault(change.key, [[]]).append([change])
    chosen = [list(chain.from_iterable(parts)) for parts in product(*by_key.values())]
    return iter(sorted(chosen, key=lambda made: (len(made), [*map(changes.index, made)])))


def _more_gpus(case: MemoryCase) -> Iterator[MemoryCase]:
    """Yield the same run on 2, 4, 8... times as many GPUs; nodes are filled first."""
    config = case.config
    while 2 * world_size(config) <= MOST_GPUS:
        cluster, fsdp = config.cluster, config.fsdp
        assert cluster.gpus_per_node is not None and fsdp.dp_shard is not None
        double = "gpus_per_node" if 2 * cluster.gpus_per_node <= NODE_GPUS else "nodes"
        before = world_size(config)
        grown = replace(cluster, **{double: 2 * getattr(cluster, double)})
        alone = replace(config.placement, slots_on_nodes=None)
        config = replace(config, cluster=grown, placement=alone)
        shards = fsdp.dp_shard * world_size(config) // before
        config = replace(config, fsdp=replace(fsdp, dp_shard=shards))
        yield case._replace(config=config)


def _vllm_fits(config: RunConfig, shape: ModelShape, gpu_bytes: int) -> bool:
    """Return whether vLLM's share of the GPU holds its weights and one sequence's KV cache."""
    rollout = config.rollout
    if rollout.kv_cache_mb is not None:
        return True
    tp, size = rollout.tensor_parallel_size, BYTES[rollout.dtype]
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    heads = max(1, shape.kv_heads // tp)
    cache = 2 * size * shape.layers * heads * shape.head_dim * longest
    weights = size * shape.parameters // tp
    return weights + cache < int(rollout.gpu_memory_utilization * gpu_bytes)


def _listed(case: MemoryCase, changes: list[Change], others: Sequence[Change] = ()) -> str:
    """Write 'cluster.nodes=2 fsdp.accumulation=sharded: 60.1 GiB at most'.

    Args:
        case: with `others` already set.
        changes: settings to add.
        others: settings to name as well.
    """
    named = " ".join(map(str, [*others, *changes]))
    return f"{named}: {gib(peak(case.phases(*changes)))} at most"
