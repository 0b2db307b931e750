"""Output of `hybridrl plan`: if a run fits, settings that would make it fit, and its time."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from hybridrl.config.estimators import uses_critic
from hybridrl.config.planner.memory import gib, listed_parts, node_ram
from hybridrl.config.planner.memory_advice import Remedy, savings
from hybridrl.config.planner.plan_text import ram_text, table
from hybridrl.config.planner.step_time import (
    DEFAULT_GPU,
    MFU,
    NETWORK,
    NVLINK,
    SCALED_ERROR,
    Rates,
    rates_of,
    step_seconds,
)
from hybridrl.config.planner.switches import FASTEST, LEAST_CACHE, Change, MemoryCase
from hybridrl.config.planner.world import world_size, world_text

# GPUs of unknown name with at least this much memory are taken for DEFAULT_GPU.
DEFAULT_BYTES = 79 * 2**30
COSTS = {
    "fsdp.accumulation": "reduce-scatter after every micro-batch",
    "fsdp.activation_checkpointing": "a second forward in every update",
    "fsdp.reshard_after_forward": "weights are gathered again for backward",
    "fsdp.offload": "copies to the host and back",
    "actor.max_tokens_per_gpu": "more and smaller micro-batches",
    "rollout.tensor_parallel_size": "fewer, larger engines that communicate at every token",
    "rollout.gpu_memory_utilization": "a smaller KV cache: fewer sequences at a time",
}


def verdict(
    case: MemoryCase, chosen: Sequence[Change], remedy: Remedy | None
) -> Iterator[RenderableType]:
    """Yield the parts of the plan.

    Args:
        case: the run with the settings chosen for it.
        chosen: those of its settings that are not the fastest, but were chosen.
        remedy: settings with which it fits; None if there are none, or none are needed.
    """
    yield from _summary(case, chosen, remedy)
    yield from _phases(case)
    fastest = {change.key: change for change in FASTEST}
    base = case.changed(fastest[change.key] for change in chosen)
    yield from _switches(base, [*chosen, *(remedy.changes if remedy else ())])
    if case.fits():
        yield from _time(case)
    elif remedy is not None:
        yield f"\nWith {remedy}:"
        yield from _time(remedy.case)


def _summary(
    case: MemoryCase, chosen: Sequence[Change], remedy: Remedy | None
) -> Iterator[RenderableType]:
    config, worst, there = case.config, case.worst(), gib(case.gpu.memory_bytes)
    rollout, prompts = config.rollout, config.data.prompts_per_step
    parameters = case.shape.parameters / 1e9
    critic = " and a critic" if uses_critic(config) else ""
    adapters = f", adapters of rank {config.lora.rank}" if config.lora else ""
    yield (
        f"{config.model.path} ({parameters:.2f} B parameters){adapters}, "
        f"{config.algorithm.advantage} advantages{critic}, on {world_text(config)}: "
        f"{case.gpu.name} of {there}"
    )
    yield (
        f"{prompts} prompts x {rollout.responses_per_prompt} responses a step, at most "
        f"{rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens"
    )
    yield ""
    if case.fits():
        yield f"It fits: at most {gib(worst.total)} ({worst.name}) of a GPU's {there}."
        if chosen:
            yield (
                f"Chosen for this, as the fastest that fit: {' '.join(map(str, chosen))}. Values "
                f"that you set stand."
            )
        return
    yield f"It does not fit: {_reason(case)}."
    if remedy is None:
        yield "No settings below make it fit, on any number of GPUs."
    elif remedy.sizes:
        gpus, more = world_size(config), world_size(remedy.case.config)
        yield (
            f"No settings make it fit on {gpus} GPU{'s' * (gpus > 1)}. On {more} GPUs it fits, "
            f"with {gib(remedy.case.peak())}: {remedy}"
        )
    else:
        yield f"It fits, with {gib(remedy.case.peak())}, with: {remedy}"


def _reason(case: MemoryCase) -> str:
    """Return what does not fit: a phase, vLLM into its share, or the ranks of a node."""
    worst, there = case.worst(), case.gpu.memory_bytes
    if worst.total > there:
        return f"{worst.name} needs {gib(worst.total)}, a GPU has {gib(there)}"
    needed = node_ram(case.config, case.shape, case.reward_shape)
    if needed > case.node_bytes:
        return f"a node needs {gib(needed)} of RAM and has {gib(case.node_bytes)}"
    share = case.config.rollout.gpu_memory_utilization
    return (
        f"rollout.gpu_memory_utilization = {share} gives vLLM {gib(share * there)}, too little for "
        f"its weights and {gib(LEAST_CACHE)} of KV cache"
    )


def _phases(case: MemoryCase) -> Iterator[RenderableType]:
    limit, least = case.gpu.memory_bytes, 0.05
    rows = (
        (p.name, gib(p.total), "no" if p.total > limit else "yes", listed_parts(p.parts, least))
        for p in case.phases()
    )
    yield ""
    yield table("Memory of a GPU by phase", ("phase", "needs", "fits", "of which (from 5 %)"), rows)
    needed = node_ram(case.config, case.shape, case.reward_shape)
    yield f"RAM of a node: {gib(needed)} at least{ram_text(case.node_bytes)}."


def _switches(base: MemoryCase, taken: Sequence[Change]) -> Iterator[RenderableType]:
    if base.fits() and not taken:
        return
    timed = _rates(base) is not None
    rows = [
        (
            str(saving.change),
            gib(saving.saved_bytes),
            (f"{max(0.0, saving.seconds):.1f} s a step: " * timed) + COSTS[saving.change.key],
            "yes" if saving.change in taken else "",
        )
        for saving in sorted(savings(base), key=lambda saving: saving.seconds / saving.saved_bytes)
    ]
    columns = ("setting", "saves", "costs about", "taken")
    worst = base.worst()
    yield ""
    title = f"Settings that save memory in {worst.name}, which needs {gib(worst.total)} without"
    yield table(title, columns, rows)


def _time(case: MemoryCase) -> Iterator[RenderableType]:
    """Yield the estimated seconds of a step, and what they rest on."""
    config, rates = case.config, _rates(case)
    yield ""
    if rates is None:
        yield "Time of a step: not estimated for an unknown GPU; gpus=8xL40S names it."
        return
    like = "" if rates_of(case.gpu.name) else f", if these are {DEFAULT_GPU}s"
    parts = step_seconds(config, case.shape, case.reward_shape, case.gpu)
    total, steps = sum(parts.values()), config.trainer.total_steps
    listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    link = NVLINK if config.cluster.nodes == 1 else NETWORK
    yield (
        f"Time of a step: {total:.0f} s +- {rates.error:.0%}{like}. Prompts and responses "
        f"count with their longest lengths; shorter ones take less. "
        f"{steps} steps: {steps * total / 3600:.1f} h.\n"
        f"Seconds: {listed}."
    )
    scaled = " scaled to this GPU's data sheet;" if rates.error == SCALED_ERROR else ""
    yield (
        f"Basis: {MFU:.0%} of {rates.peak / 1e12:.0f} TFLOP/s in training, {link / 1e9:.0f} GB/s "
        f"between GPUs, none of it hidden, and vLLM's decoding steps: measured with Qwen2.5-1.5B's "
        f"shape on 1 to 4 H200s (benchmarks/RESULTS.md);{scaled} sampling takes up to twice as "
        f"long on hosts with slow cores."
    )


def _rates(case: MemoryCase) -> Rates | None:
    """Return the rates of the case's GPU, or of the one that it is taken for."""
    by_size = rates_of(DEFAULT_GPU) if case.gpu.memory_bytes >= DEFAULT_BYTES else None
    return rates_of(case.gpu.name) or by_size
