"""Checks of predicted memory (planner/memory.py) against GPUs and nodes."""

from collections.abc import Iterator
from operator import attrgetter

from hybridrl.config.choices import Accelerator
from hybridrl.config.errors import Problem
from hybridrl.config.planner.fitting import LEAST_CACHE, MemoryCase, advice, remedy, savings
from hybridrl.config.planner.machine import Machine
from hybridrl.config.planner.memory import (
    LEFT_FOR_CACHE,
    SCORE,
    describe,
    gib,
    host_parts,
    largest,
    listed_parts,
    rank_phases,
    tightest_node,
)
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.schema import RunConfig

SLOTS = "cluster.gpus_per_node"
# Keys that decide the memory of a phase; of others it is the model.
DECISIVE = {"rollout": "rollout.gpu_memory_utilization"}


def memory_problems(
    config: RunConfig, shape: ModelShape, machine: Machine, frozen: Frozen = ()
) -> Iterator[Problem]:
    """Check that the run fits into GPU memory and RAM, if its engines are possible."""
    case = MemoryCase(config, shape, frozen, machine)
    if config.hardware.accelerator is not Accelerator.gpu:
        yield from _slot_problems(case)
    elif machine.gpus and case.has_engines():  # no settings help an impossible engine
        yield from _gpu_problems(case)
        yield from _host_problems(case)


def _slot_problems(case: MemoryCase) -> Iterator[Problem]:
    worst = largest(rank_phases(case.config, case.shape, None, case.frozen))
    slots, needed, available = tightest_node(case.config, case.machine, worst.total)
    if needed > available:
        why = (
            f"the CPU slots need at least {gib(needed)} of RAM, the node has {gib(available)}: a "
            f"slot's peak is {describe(worst)}"
        )
        remedy = (
            f"Lower {SLOTS}, rollout.kv_cache_mb or actor.max_tokens_per_gpu, or set a smaller "
        )
        yield Problem("slot_memory", SLOTS, slots, "less", why, f"{remedy}model")


def _gpu_problems(case: MemoryCase) -> Iterator[Problem]:
    """Yield one problem for all phases that do not fit, and one for those of frozen models."""
    config, there = case.config, case.gpu.memory_bytes
    over = [phase for phase in case.phases() if phase.total > there]
    remedies = _help(case) if over else ""
    of_frozen = {f"{SCORE} {model.name}": model for model in case.frozen}
    for is_frozen in (False, True):
        phases = [phase for phase in over if (phase.name in of_frozen) is is_frozen]
        if phases:
            worst = largest(phases)
            others = ", ".join(f"{p.name} {gib(p.total)}" for p in phases if p is not worst)
            key = DECISIVE.get(worst.name, "model.path")
            if worst.parts.get("KV cache", 0) > worst.total / 2:
                key = "rollout.kv_cache_mb"
            value = attrgetter(key)(config)
            if is_frozen:
                key, value = of_frozen[worst.name].key, of_frozen[worst.name].path
            why = f"{worst.name} needs {describe(worst)}, the GPU has {gib(there)}"
            why += f"; also too large: {others}" if others else ""
            yield Problem("gpu_memory", key, value, "", why, remedies)
    share = config.rollout.gpu_memory_utilization
    parts = case.phases()[1].parts
    if parts.get(LEFT_FOR_CACHE, LEAST_CACHE) < LEAST_CACHE and not over:
        why = (
            f"that gives vLLM {gib(share * there)}, but its weights take "
            f"{gib(parts['rollout weights'])}, and a KV cache at least {gib(LEAST_CACHE)}"
        )
        remedy = "Raise it or rollout.tensor_parallel_size"
        yield Problem("cache_memory", DECISIVE["rollout"], share, "more", why, remedy)


def _help(case: MemoryCase) -> str:
    """List what each setting saves in the largest phase, and some that fit together."""
    strongest = {saving.change.key: saving for saving in savings(case)}.values()
    saved = ", ".join(f"{saving.change} {gib(saving.saved_bytes)}" for saving in strongest)
    alone = f"Alone these save in {case.worst().name}: {saved}.\n" if saved else ""
    return alone + advice(case, remedy(case))


def _host_problems(case: MemoryCase) -> Iterator[Problem]:
    if case.has_ram():
        return
    config, parts = case.config, host_parts(case.config, case.shape, case.frozen)
    slots, needed, available = case.tightest_node()
    causes = [
        (key, value)
        for key, value, part in (
            ("fsdp.offload", config.fsdp.offload, "offload"),
            ("checkpoint.every_steps", config.checkpoint.every_steps, "checkpoint staging"),
        )
        if parts[part]
    ]
    key, value = causes[0] if causes else (SLOTS, slots)
    also = f"with {causes[1][0]} = {causes[1][1]} " if causes[1:] else ""
    why = (
        f"{also}each of a node's {slots} GPUs takes {listed_parts(parts)} of RAM, together "
        f"{gib(needed)}; the node (or its cgroup) has {gib(available)}"
    )
    remedy = (
        f"Set a weaker fsdp.offload, checkpoint.every_steps=0 (no checkpoints), a lower {SLOTS}, "
        f"or more nodes (cluster.nodes) to spread the weights over"
    )
    yield Problem("host_memory", key, value, "", why, remedy)
