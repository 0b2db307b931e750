"""Derivation of config values: nulls (GPUs, shards, sequences, processes, memory) and shares."""

import math
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain

from hybridrl.config.annotations import NoValue, Unusable, is_null, set_value
from hybridrl.config.checks.algorithm import layer_sharing_problems, sharing_problems
from hybridrl.config.checks.resources import gpu_counts
from hybridrl.config.checks.sizes import (
    divisors,
    fitting_mini_batches,
    listed,
    step_responses,
    steps_in_flight,
)
from hybridrl.config.choices import Accelerator, DType, RolloutWeights
from hybridrl.config.errors import ConfigError, Problem, Report
from hybridrl.config.estimators import is_supervised
from hybridrl.config.planner.fitting import (
    FASTER_STILL,
    FASTEST,
    ROOM,
    Change,
    MemoryCase,
    cheapest,
    memory_changes,
)
from hybridrl.config.planner.machine import GIB, GPU, Machine, planned_machine, with_any_ram
from hybridrl.config.planner.memory import (
    LEFT_FOR_CACHE,
    MIB,
    VLLM_BUFFER_BYTES,
    gib,
    rollout_parts,
    useful_cache_mb,
)
from hybridrl.config.planner.shape import Frozen, ModelShape, has_flash_kernel
from hybridrl.config.planner.world import num_engines, training_ranks, training_text
from hybridrl.config.schema import RunConfig

MAX_REWARD_PROCESSES = 8
# vLLM's own default on GPUs of 70 GiB and more; its KV cache may hold fewer at a time.
MAX_NUM_SEQS = 1024
# Limits of trainer.max_log_prob_diff: float32 on CPUs; bfloat16, and float32 on GPUs; FP8 weights,
# with which SmolLM2-135M's differ by 0.16.
EXACT_LOG_PROBS, ROUNDED_LOG_PROBS, FP8_LOG_PROBS = 1e-3, 0.1, 0.5
# Longest prompts, in tokens, whose sharing does not need much more memory where attention pads.
SHORT_PROMPT = 256
# In lora.target_modules: every linear layer of the model's family.
ALL_LINEAR = "all-linear"


def machine_of(config: RunConfig, machine: Machine) -> Machine:
    """Return the machine that a dry run plans for: this one, or one of cluster.gpu_memory_gb."""
    cluster, placement = config.cluster, config.placement
    with suppress(Unusable):
        counts = placement.slots_on_nodes or [cluster.gpus_per_node or 0] * cluster.nodes
        on_gpu = config.hardware.accelerator is Accelerator.gpu
        if on_gpu and cluster.gpu_memory_gb is not None and config.run.dry and all(counts):
            return planned_machine(counts, GPU("GPUs", int(cluster.gpu_memory_gb * GIB)))
    return machine


def derive(config: RunConfig, machine: Machine, report: Report) -> None:
    """Replace nulls and shares by numbers; report nulls that cannot be derived."""
    with suppress(Unusable):
        _set_slots(config, machine)
    for key, rule in (
        ("cluster.gpus_per_node", _gpus),
        ("fsdp.dp_shard", _shards),
        ("rollout.max_in_flight", _in_flight),
        ("rollout.max_num_seqs", _num_seqs),
        ("reward.num_processes", _processes),
        ("trainer.max_log_prob_diff", _log_prob_limit),
    ):
        if is_null(config, key):
            set_value(config, key, NoValue(key))
            with suppress(Unusable):
                try:
                    set_value(config, key, rule(config, machine))
                except ConfigError as error:
                    report.problems += error.problems
    with suppress(Unusable):
        _set_mini_batch(config)


def name_adapted_layers(config: RunConfig, shape: ModelShape | None) -> None:
    """Replace all-linear in lora.target_modules by the linear layers of the model's family."""
    with suppress(Unusable):
        for lora in (config.lora, config.actor.lora, config.ref.lora, config.rollout.lora):
            if shape is not None and lora is not None and lora.target_modules == [ALL_LINEAR]:
                lora.target_modules = list(shape.linear_layers)


def choose_sharing(config: RunConfig, shape: ModelShape | None, frozen: Frozen) -> None:
    """Replace a null of fsdp.share_prefixes: true if all models of the run can share tokens.

    Not if attention pads: its masks of prompts could need more memory than is planned.
    """
    key = "fsdp.share_prefixes"
    if is_null(config, key):
        set_value(config, key, True)
        shares = False
        with suppress(Unusable):
            if shape is not None:
                of_frozen = (layer_sharing_problems(config, model.shape) for model in frozen)
                refused = chain(sharing_problems(config, shape), *of_frozen)
                pads = _pads(config, [shape, *(model.shape for model in frozen)])
                shares = not pads and not any(refused)
        set_value(config, key, shares)


def _pads(config: RunConfig, shapes: Iterable[ModelShape]) -> bool:
    """Return whether attention pads: on CPUs with long prompts, on GPUs without FlashAttention.

    Each sequence is padded with its prompt, although that is shared. FlashAttention has neither
    float32 nor all sizes of heads.
    """
    if config.hardware.accelerator is Accelerator.cpu:
        return config.rollout.max_prompt_tokens > SHORT_PROMPT
    attentions = chain.from_iterable(shape.attentions for shape in shapes)
    flash = all(has_flash_kernel(attention.head_dim) for attention in attentions)
    return config.fsdp.param_dtype is DType.float32 or not flash


def _set_slots(config: RunConfig, machine: Machine) -> None:
    """Resolve placement.slots_on_nodes from unequal nodes, and gpus_per_node from it."""
    cluster, placement = config.cluster, config.placement
    if placement.slots_on_nodes is None and cluster.gpus_per_node is None:
        counts = gpu_counts(machine, cluster.nodes)
        tp = 1 if placement.allow_straddle else config.rollout.tensor_parallel_size
        unequal = len(set(counts)) > 1 and min(counts) >= tp
        if config.hardware.accelerator is Accelerator.gpu and unequal:
            placement.slots_on_nodes = [count // tp * tp for count in counts]
    if placement.slots_on_nodes:
        cluster.gpus_per_node = max(placement.slots_on_nodes)


def _set_mini_batch(config: RunConfig) -> None:
    """Resolve a share of the step's responses to the nearest size that divides, by ratio.

    1 is a share, too, as 1.0 is. A share that is none, or that no size fits, stays: the checks of a
    training report it.
    """
    share = float(config.actor.mini_batch_size)
    if share <= 1:
        wanted = share * step_responses(config)
        near = sorted(fitting_mini_batches(config), key=lambda n: (abs(math.log(n / wanted)), -n))
        config.actor.mini_batch_size = near[0] if near else share


def _gpus(config: RunConfig, machine: Machine) -> int:
    """Return one CPU slot, or the GPUs that each node has."""
    if config.hardware.accelerator is Accelerator.cpu:
        return 1
    if machine.gpus:
        return max(1, gpu_counts(machine, config.cluster.nodes)[-1])
    if not config.run.dry:  # the missing GPUs have their own problem
        raise Unusable("cluster.gpus_per_node")
    key, why = "cluster.gpus_per_node", "null is all GPUs of a node, but this machine has none"
    remedy = f"Set {key} to the GPUs of a node of the planned machine"
    raise ConfigError(Problem("gpus_to_plan", key, None, "a number", why, remedy))


def _shards(config: RunConfig, machine: Machine) -> int:
    """Return the ranks that dp_replicate leaves."""
    world, copies = training_ranks(config), config.fsdp.dp_replicate
    if world < 1:
        raise Unusable("fsdp.dp_shard")  # the check of the mesh reports it
    if world % copies == 0:
        return world // copies
    key, why = "fsdp.dp_replicate", "every copy needs the same number of ranks"
    expected, remedy = f"a divisor of {training_text(config)}", f"Set {key} to one of "
    remedy += listed(divisors(world))
    raise ConfigError(Problem("copies", key, copies, expected, why, remedy))


def _in_flight(config: RunConfig, machine: Machine) -> int:
    """Return the prompts of a step, or of two if rollout.max_versions allows that."""
    return config.data.prompts_per_step * min(2, steps_in_flight(config.rollout))


def _num_seqs(config: RunConfig, machine: Machine) -> int:
    """Return the responses per engine and step, or evaluation, at most MAX_NUM_SEQS."""
    rollout, prompts = config.rollout, config.data.prompts_per_step
    engines = num_engines(config)
    if is_supervised(config):  # samples only for evaluation
        prompts = config.data.num_eval_problems or MAX_NUM_SEQS
    prompts = math.ceil(prompts / engines)
    return min(MAX_NUM_SEQS, prompts * rollout.responses_per_prompt)


def _processes(config: RunConfig, machine: Machine) -> int:
    return max(1, min(MAX_REWARD_PROCESSES, machine.nodes[0].cores))


def _log_prob_limit(config: RunConfig, machine: Machine) -> float:
    """Return the limit of vLLM's and the trainer's difference, which is that of their weights."""
    if config.rollout.weights is RolloutWeights.fp8:
        return FP8_LOG_PROBS
    on_cpu = config.hardware.accelerator is Accelerator.cpu
    dtypes = {config.fsdp.param_dtype, config.rollout.dtype}
    return EXACT_LOG_PROBS if on_cpu and dtypes == {"float32"} else ROUNDED_LOG_PROBS


def choose_for_memory(
    config: RunConfig, shape: ModelShape | None, frozen: Frozen, machine: Machine
) -> list[Change]:
    """Replace nulls that cost memory by the fastest values with which the run fits into its GPUs.

    Values that the user set stand. If nothing fits, all are the fastest. The result depends on
    config, model and machine only, so that a resume there chooses the same.

    Returns:
        The values that are not the fastest; hardware.reason says so.
    """
    nulls, faster_still = (
        [change for change in changes if is_null(config, change.key)]
        for changes in (FASTEST, FASTER_STILL)
    )
    if is_null(config, "fsdp.reshard_after_forward"):
        config.fsdp.reshard_after_forward = True
    for change in nulls:
        set_value(config, *change)
    chosen: list[Change] = []
    faster: list[Change] = []
    with suppress(Unusable, ConfigError):  # the checks report a ConfigError with all others
        if config.hardware.accelerator is Accelerator.gpu and machine.gpus and shape is not None:
            _limit_cache(config, shape, machine)
            case = MemoryCase(config, shape, frozen, machine)
            if not case.has_ram():  # a problem of its own, to which all of these are equal or worse
                case = case._replace(machine=with_any_ram(machine))
            keys = {change.key for change in nulls}
            changes = [of_key for of_key in memory_changes(config) if of_key[0].key in keys]
            if case.has_engines() and not case.fits(ROOM):
                chosen = cheapest(case, changes, ROOM) or cheapest(case, changes) or []
            if chosen:
                then, without = (gib(one.peak()) for one in (case.changed(chosen), case))
                config.hardware.reason += (
                    f"; chosen for its memory: {' '.join(map(str, chosen))} "
                    f"({then} at most, {without} otherwise)"
                )
            case = case.changed(chosen)
            for change in faster_still:
                if case.changed([*faster, change]).fits(ROOM):
                    faster.append(change)
            if faster:
                peak = gib(case.changed(faster).peak())
                config.hardware.reason += (
                    f"; chosen for its speed: {' '.join(map(str, faster))} ({peak} at most)"
                )
    for change in [*chosen, *faster]:
        set_value(config, *change)
    return chosen


def _limit_cache(config: RunConfig, shape: ModelShape, machine: Machine) -> None:
    """Set rollout.kv_cache_mb if a step uses less than rollout.gpu_memory_utilization leaves.

    Not with recurrent layers, of whose states vLLM alone knows the size.
    """
    if is_null(config, "rollout.kv_cache_mb") and not shape.recurrent:
        smallest = min(gpu.memory_bytes for gpu in machine.gpus)
        useful = useful_cache_mb(config, shape)
        left = rollout_parts(config, shape, smallest)[LEFT_FOR_CACHE]
        if useful * MIB + VLLM_BUFFER_BYTES < left:
            config.rollout.kv_cache_mb = useful
