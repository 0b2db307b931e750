"""Checks of predicted memory (planner/memory.py) against GPUs and nodes."""

from collections.abc import Iterator
from operator import attrgetter

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.memory import (
    REWARD_PHASE,
    Phase,
    describe,
    gib,
    host_parts,
    listed_parts,
    on_node,
    rank_phases,
)
from hybridrl.config.planner.memory_advice import advice
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.switches import MemoryCase
from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.config.schema import RunConfig

# Keys that decide the memory of a phase; of others it is the model.
DECISIVE = {
    "rollout": "rollout.gpu_memory_utilization",
    REWARD_PHASE: "reward_model.model.path",
}


def memory_problems(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None = None
) -> Iterator[str]:
    """Check that the run fits into GPU memory and RAM."""
    if config.hardware.accelerator is not Accelerator.gpu:
        phases = rank_phases(config, shape, None, reward_shape)
        yield from _slot_problems(config, phases, machine)
    elif machine.gpus:
        yield from _gpu_problems(MemoryCase.of(config, shape, reward_shape, machine))
        yield from _host_problems(config, shape, machine, reward_shape)


def _tightest(config: RunConfig, machine: Machine, per_rank: int) -> tuple[int, int, int]:
    """Return (ranks, needed bytes, available bytes) of the node with the least spare memory.

    The largest demand is placed on the largest node.
    """
    demand = sorted(slots_on_nodes(config), reverse=True)
    largest = sorted((node.memory_bytes for node in machine.nodes), reverse=True)
    nodes = zip(demand, largest, strict=False)
    pairs = [(slots, on_node(config, per_rank, slots), there) for slots, there in nodes]
    return max(pairs, key=lambda pair: pair[1] - pair[2])


def _slot_problems(config: RunConfig, phases: list[Phase], machine: Machine) -> Iterator[str]:
    worst = max(phases, key=lambda phase: phase.total)
    slots, needed, available = _tightest(config, machine, worst.total)
    if needed > available:
        yield (
            f"cluster.gpus_per_node = {slots} CPU slots need at least "
            f"{gib(needed)} of RAM, the node has {gib(available)}: a slot's peak is "
            f"{describe(worst)}.\n"
            f"Lower cluster.gpus_per_node, rollout.kv_cache_mb or actor.max_tokens_per_gpu, or "
            f"set a smaller model."
        )


def _gpu_problems(case: MemoryCase) -> Iterator[str]:
    """Yield one problem for all phases that do not fit, and one for the reward model's."""
    config, gpu_bytes = case.config, case.gpu.memory_bytes
    over = [phase for phase in case.phases() if phase.total > gpu_bytes]
    for of_reward_model in (False, True):
        phases = [phase for phase in over if (phase.name == REWARD_PHASE) is of_reward_model]
        if phases:
            worst = max(phases, key=lambda phase: phase.total)
            others = [f"{p.name} {gib(p.total)}" for p in phases if p is not worst]
            also = f"; also too large: {', '.join(others)}" if others else ""
            key = DECISIVE.get(worst.name, "model.path")
            yield (
                f"{key} = {attrgetter(key)(config)}: {worst.name} needs {describe(worst)}, the GPU "
                f"has {gib(gpu_bytes)}{also}.\n{advice(case, worst)}"
            )
    budget = int(config.rollout.gpu_memory_utilization * gpu_bytes)
    weights = case.phases()[0].parts["rollout weights"]
    if config.rollout.kv_cache_mb is None and weights >= budget and not over:
        yield (
            f"rollout.gpu_memory_utilization = {config.rollout.gpu_memory_utilization} gives vLLM "
            f"{gib(budget)}, but its weights alone take {gib(weights)}.\n"
            f"Raise it or rollout.tensor_parallel_size."
        )


def _host_problems(
    config: RunConfig, shape: ModelShape, machine: Machine, reward_shape: ModelShape | None
) -> Iterator[str]:
    parts = host_parts(config, shape, reward_shape)
    slots, needed, available = _tightest(config, machine, sum(parts.values()))
    if needed <= available:
        return
    causes = [
        f"{key} page-locks {gib(parts[part])}"
        for key, part in (
            (f"fsdp.offload = {config.fsdp.offload}", "offload"),
            (f"checkpoint.every_steps = {config.checkpoint.every_steps}", "checkpoint staging"),
        )
        if parts[part]
    ] or [f"cluster.gpus_per_node = {slots}: processes take {gib(sum(parts.values()))}"]
    yield (
        f"{' and '.join(causes)} of RAM for each of a node's {slots} GPUs; with the processes "
        f"that makes {gib(needed)} ({listed_parts(parts)} each), the node (or its cgroup) has "
        f"{gib(available)}.\n"
        f"Set a weaker fsdp.offload, checkpoint.every_steps=0 (no checkpoints), a lower "
        f"cluster.gpus_per_node, or more nodes (cluster.nodes) to spread the weights over."
    )
