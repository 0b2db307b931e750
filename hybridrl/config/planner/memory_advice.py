"""Advice for a run that does not fit into GPU memory: settings, or more GPUs.

Every candidate is set in a copy of the config, whose memory is predicted again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, product
from typing import Any, NamedTuple

from hybridrl.config.checks.sizes import engine_problems, tensor_parallel_problems
from hybridrl.config.choices import Accumulation, Offload
from hybridrl.config.planner.memory import GIB, LEFT_FOR_CACHE, Phase, gib, node_ram, rank_phases
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import world_size
from hybridrl.config.schema import RunConfig

# GPUs of a full node, and of the largest run.
NODE_GPUS, MOST_GPUS = 8, 1024
# vLLM's KV cache and buffers.
LEAST_CACHE = GIB


class Change(NamedTuple):
    """A setting to try."""

    key: str
    value: Any

    def __str__(self) -> str:
        words = {"True": "true", "None": "null"}
        return f"{self.key}={words.get(str(self.value), self.value)}"


class MemoryCase(NamedTuple):
    """Inputs of a memory prediction, and its limits: the smallest GPU and the smallest node."""

    config: RunConfig
    shape: ModelShape
    reward_shape: ModelShape | None
    gpu_bytes: int
    node_bytes: int

    def phases(self, *changes: Change) -> list[Phase]:
        """Predict memory by phase with these settings."""
        config = with_changes(self.config, changes)
        return rank_phases(config, self.shape, self.gpu_bytes, self.reward_shape)

    def peak(self, *changes: Change) -> int:
        """Return the memory of the largest phase."""
        return max(phase.total for phase in self.phases(*changes))

    def fits(self, *changes: Change) -> bool:
        """Return whether the run fits with these settings."""
        config = with_changes(self.config, changes)
        rollout = self.phases(*changes)[1].parts
        return (
            self.peak(*changes) <= self.gpu_bytes
            and rollout.get(LEFT_FOR_CACHE, LEAST_CACHE) >= LEAST_CACHE
            and not any(engine_problems(config))
            and not any(tensor_parallel_problems(config, self.shape))
            and node_ram(config, self.shape, self.reward_shape) <= self.node_bytes
        )


def advice(case: MemoryCase, worst: Phase) -> str:
    """List what each setting saves in the worst phase, and some that fit together."""
    saved = []
    for change in _memory_changes(case.config):
        then = next(phase for phase in case.phases(change) if phase.name == worst.name)
        if then.total < worst.total:
            saved.append(f"{change} {gib(worst.total - then.total)}")
    alone = f"Alone these save in {worst.name}: {', '.join(saved)}.\n" if saved else ""
    for larger, sizes in [(case, []), *_more_gpus(case)]:
        found = _settings_that_fit(larger)
        if found is not None:
            gpus = [world_size(one.config) for one in (case, larger)]
            how = f"It does not fit {gpus[0]} GPUs, but {gpus[1]}: set" if sizes else "Set"
            named = " ".join(map(str, [*sizes, *found]))
            return f"{alone}{how} {named}: {gib(larger.peak(*found))} at most."
    return f"{alone}Set a smaller model.path, or train adapters (lora=default)."


def with_changes(config: RunConfig, changes: Sequence[Change]) -> RunConfig:
    """Copy a config with other settings, links to them included."""
    for change in changes:
        section, name = change.key.split(".")
        changed = replace(vars(config)[section], **{name: change.value})
        config = replace(config, **{section: changed})
        if change.key == "rollout.tensor_parallel_size":
            fsdp = replace(config.fsdp, tensor_parallel_size=change.value)
            config = replace(config, fsdp=fsdp)
    return config


def _memory_changes(config: RunConfig) -> list[Change]:
    """List settings that trade time for memory, cheapest first."""
    changes = [
        Change("fsdp.accumulation", Accumulation.sharded),
        Change("fsdp.activation_checkpointing", True),
        Change("fsdp.reshard_after_forward", True),
    ]
    found = [change for change in changes if with_changes(config, [change]) != config]
    offloads = list(Offload)
    stronger = offloads[offloads.index(config.fsdp.offload) + 1 :]
    return [*found, *(Change("fsdp.offload", value) for value in stronger)]


def _rollout_changes(config: RunConfig) -> Iterator[list[Change]]:
    """Yield nothing, larger engines, and other shares of the GPU for them, nearest first."""
    tp, share = config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization
    yield []
    yield from ([Change("rollout.tensor_parallel_size", tp * 2**power)] for power in range(1, 4))
    shares = sorted((tenths / 10 for tenths in range(2, 10)), key=lambda other: abs(other - share))
    yield from ([Change("rollout.gpu_memory_utilization", s)] for s in shares if s != share)


def _batch_changes(config: RunConfig) -> Iterator[list[Change]]:
    """Yield nothing, then smaller micro-batches, down to one sequence."""
    rollout, tokens = config.rollout, config.actor.max_tokens_per_gpu
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // config.fsdp.ulysses_size)
    yield []
    for half in (tokens // 2**power for power in range(1, 6)):
        if half >= least:
            yield [Change("actor.max_tokens_per_gpu", half)]


def _settings_that_fit(case: MemoryCase) -> list[Change] | None:
    """Find the fewest settings that fit; smaller micro-batches only if necessary."""
    kinds = groupby(_memory_changes(case.config), key=lambda change: change.key)
    trades = [[*([change] for change in changes), []] for _, changes in kinds]
    for batch in _batch_changes(case.config):
        choices = (
            [*chain(*chosen), *rollout, *batch]
            for rollout, *chosen in product(_rollout_changes(case.config), *trades)
        )
        found = next((changes for changes in sorted(choices, key=len) if case.fits(*changes)), None)
        if found is not None:
            return found
    return None


def _more_gpus(case: MemoryCase) -> Iterator[tuple[MemoryCase, list[Change]]]:
    """Yield the same run on 2, 4, 8... times as many GPUs, nodes filled first; and its settings."""
    config = case.config
    nodes, gpus = config.cluster.nodes, config.cluster.gpus_per_node
    assert gpus is not None
    while 2 * nodes * gpus <= MOST_GPUS:
        nodes, gpus = (nodes, 2 * gpus) if 2 * gpus <= NODE_GPUS else (2 * nodes, gpus)
        sizes = [Change("cluster.nodes", nodes), Change("cluster.gpus_per_node", gpus)]
        sizes = [size for size in sizes if with_changes(config, [size]) != config]
        if config.placement.slots_on_nodes is not None:
            sizes.append(Change("placement.slots_on_nodes", None))
        mesh = Change("fsdp.dp_shard", nodes * gpus // config.fsdp.dp_replicate)
        yield case._replace(config=with_changes(config, [*sizes, mesh])), sizes
