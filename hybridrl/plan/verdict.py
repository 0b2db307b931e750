"""Output of `hybridrl plan`: if a run fits, settings that would make it fit, and its time."""

import re
from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from hybridrl.config.checks.fp8 import fp8_problems
from hybridrl.config.choices import RolloutWeights
from hybridrl.config.estimators import is_supervised, uses_critic
from hybridrl.config.planner.fitting import (
    FASTEST,
    LEAST_CACHE,
    ROOM,
    Change,
    MemoryCase,
    advice,
    savings,
)
from hybridrl.config.planner.flops import H100, DataSheet, data_sheet
from hybridrl.config.planner.memory import gib
from hybridrl.config.planner.step_time import MFU, NETWORK, NVLINK, step_seconds
from hybridrl.config.planner.world import world_text
from hybridrl.plan.tables import memory_tables, table

# GPUs of unknown name with at least this much memory are taken for H100s.
H100_BYTES = 79 * 2**30
# With fewer parameters FP8 weights were not seen to be faster. GPUs with FP8.
FP8_PARAMETERS, FP8_GPUS = 6.5e9, re.compile(r"\b(GH|H|B)[12]00\b|\bL40S\b")
# GPUs on which steps were measured, the error of an estimate there, and on all others.
MEASURED, ERROR, SCALED_ERROR = re.compile(r"\bH[12]00\b"), 0.3, 0.5
COSTS = {
    "fsdp.accumulation": "reduce-scatter after every micro-batch",
    "fsdp.activation_checkpointing": "a second forward in every update",
    "fsdp.reshard_after_forward": "weights are gathered again for backward",
    "rollout.sleep": "memory of vLLM is freed and mapped again",
    "fsdp.offload": "copies to the host and back",
    "actor.max_tokens_per_gpu": "more and smaller micro-batches",
    "rollout.tensor_parallel_size": "fewer, larger engines that communicate at every token",
    "rollout.kv_cache_mb": "fewer sequences at a time",
    "rollout.gpu_memory_utilization": "a smaller KV cache: fewer sequences at a time",
}


def verdict(
    case: MemoryCase, chosen: Sequence[Change], fitting: list[Change] | None
) -> Iterator[RenderableType]:
    """Yield the parts of the plan.

    Args:
        case: the run with the settings chosen for it.
        chosen: those of its settings that are not the fastest, but were chosen.
        fitting: settings with which it fits; empty if none are needed, None if there are none.
    """
    yield from _summary(case)
    if fitting == []:
        there, worst = gib(case.gpu.memory_bytes), case.worst()
        yield f"It fits: at most {gib(worst.total)} ({worst.name}) of a GPU's {there}."
        if worst.total > ROOM * case.gpu.memory_bytes:
            yield "It is tight: torch's allocator keeps 1.14 to 1.18 times what tensors take."
        if chosen:
            yield (
                f"Chosen for this, as the fastest that fit: {' '.join(map(str, chosen))}. Values "
                f"that you set stand."
            )
    else:
        yield f"It does not fit: {_reason(case)}.\n{advice(case, fitting)}"
    yield ""
    yield from memory_tables(case.config, case.shape, case.machine, case.frozen)
    keys = {change.key for change in chosen}
    base = case.changed(change for change in FASTEST if change.key in keys)
    yield from _savings(base, [*chosen, *(fitting or [])])
    if fitting is not None:
        yield f"\nWith {' '.join(map(str, fitting))}:" if fitting else ""
        yield from _time(case.changed(fitting))


def _summary(case: MemoryCase) -> Iterator[str]:
    config, parameters = case.config, case.shape.parameters / 1e9
    critic = " and a critic" if uses_critic(config) else ""
    adapters = f", adapters of rank {config.lora.rank}" if config.lora else ""
    yield (
        f"{config.model.path} ({parameters:.2f} B parameters){adapters}, "
        f"{config.algorithm.advantage} advantages{critic}, on {world_text(config)}: "
        f"{case.gpu.name} of {gib(case.gpu.memory_bytes)}"
    )
    yield (
        f"{config.data.prompts_per_step} prompts x {config.rollout.responses_per_prompt} responses "
        f"a step, at most {config.rollout.max_prompt_tokens} + "
        f"{config.rollout.max_response_tokens} tokens\n"
    )
    if case.shape.untested:
        yield f"Untested: {case.shape.untested}.\n"


def _reason(case: MemoryCase) -> str:
    """Return what does not fit: a phase, vLLM into its share, or the ranks of a node."""
    worst, there = case.worst(), case.gpu.memory_bytes
    if worst.total > there:
        return f"{worst.name} needs {gib(worst.total)}, a GPU has {gib(there)}"
    _, needed, available = case.tightest_node()
    if needed > available:
        return f"a node needs {gib(needed)} of RAM and has {gib(available)}"
    share = case.config.rollout.gpu_memory_utilization
    return (
        f"rollout.gpu_memory_utilization = {share} gives vLLM {gib(share * there)}, too little for "
        f"its weights and {gib(LEAST_CACHE)} of KV cache"
    )


def _savings(base: MemoryCase, taken: Sequence[Change]) -> Iterator[RenderableType]:
    """Yield the settings that save memory; nothing if none is needed."""
    if base.fits() and not taken:
        return
    timed, worst = _sheet(base) is not None, base.worst()
    rows = [
        (
            str(saving.change),
            gib(saving.saved_bytes),
            (f"{max(0.0, saving.seconds):.1f} s a step: " * timed) + COSTS[saving.change.key],
            "yes" if saving.change in taken else "",
        )
        for saving in sorted(savings(base), key=lambda saving: saving.seconds / saving.saved_bytes)
    ]
    yield ""
    title = f"Settings that save memory in {worst.name}, which needs {gib(worst.total)} without"
    yield table(title, ("setting", "saves", "costs about", "taken"), rows)


def _time(case: MemoryCase) -> Iterator[str]:
    """Yield the estimated seconds of a step, and what they rest on."""
    config, name, sheet = case.config, case.gpu.name, _sheet(case)
    if sheet is None:
        yield "Time of a step: not estimated for an unknown GPU; gpus=8xL40S names it."
        return
    like = "" if data_sheet(name) else ", if these are H100s"
    error, scaled = ERROR, ""
    if not like and not MEASURED.search(name):
        error, scaled = SCALED_ERROR, " scaled to this GPU's data sheet;"
    parts = step_seconds(config, case.shape, case.frozen, case.gpu)
    total, steps = sum(parts.values()), config.trainer.total_steps
    run = f"{steps} steps: {steps * total / 3600:.1f} h."
    if config.trainer.epochs is not None:
        run = "The steps of trainer.epochs depend on the data: run.dry=true counts them."
    listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
    link = NVLINK if config.cluster.nodes == 1 else NETWORK
    yield (
        f"Time of a step: {total:.0f} s +- {error:.0%}{like}. "
        f"Prompts and responses count with their longest lengths; shorter ones take less. "
        f"{run}\n"
        f"Seconds: {listed}.\n"
        f"Basis: {MFU:.0%} of {sheet.peak / 1e12:.0f} TFLOP/s in training, {link / 1e9:.0f} GB/s "
        f"between GPUs, none of it hidden, and vLLM's decoding steps: measured with Qwen2.5-1.5B's "
        f"shape on 1 to 4 H200s (benchmarks/RESULTS.md);"
        f"{scaled} sampling takes up to twice as long on hosts with slow cores."
    )
    with_fp8 = case.changed([Change("rollout.weights", RolloutWeights.fp8)])
    if _suits_fp8(case) and not any(fp8_problems(with_fp8.config, case.shape)):
        faster = sum(step_seconds(with_fp8.config, case.shape, case.frozen, case.gpu).values())
        yield (
            f"rollout.weights=fp8 samples faster with models of this size: {faster:.0f} s a step "
            f"(docs/resharding.md)."
        )


def _suits_fp8(case: MemoryCase) -> bool:
    """Return whether FP8 weights of vLLM are off, and known to be faster."""
    config, is_large = case.config, case.shape.parameters >= FP8_PARAMETERS
    samples = config.rollout.weights is RolloutWeights.dtype and not is_supervised(config)
    return samples and is_large and bool(FP8_GPUS.search(case.gpu.name))


def _sheet(case: MemoryCase) -> DataSheet | None:
    """Return the rates of the case's GPU, or of the one that it is taken for."""
    by_size = H100 if case.gpu.memory_bytes >= H100_BYTES else None
    return data_sheet(case.gpu.name) or by_size
