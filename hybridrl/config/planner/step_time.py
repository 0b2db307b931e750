"""Estimated seconds of a training step, from FLOPs, bytes and measured rates.

Every prompt and response counts with its longest length, so shorter ones take less. Training is a
share of the GPU's peak, plus what is exchanged between ranks, as if nothing of it were hidden.
Decoding steps are time on the host, plus products or weights, whichever is slower, plus the cache.
Rates are those of benchmarks/RESULTS.md, for 1.5 B parameters on one to four H200s; other GPUs are
scaled by their data sheets.

Symbols:  c = sequences decoded together   P = parameters   n = shards
Units:    seconds, bytes, operations
"""

import math

from hybridrl.config.choices import Accumulation, Offload, RolloutWeights, SleepMode
from hybridrl.config.estimators import is_supervised, trains_reward_model, uses_critic
from hybridrl.config.planner.flops import (
    H100,
    LEAST_SHARED,
    UNITS_PER_RANK,
    DataSheet,
    attention_flops,
    data_sheet,
    forward_flops,
    training_flops,
)
from hybridrl.config.planner.machine import GPU
from hybridrl.config.planner.memory import (
    ADAM_BYTES,
    LEFT_FOR_CACHE,
    VLLM_BUFFERS,
    roles_of,
    rollout_parts,
    token_cache_bytes,
    workload,
)
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.planner.training_memory import BYTES, MASTER_BYTES, key_share
from hybridrl.config.planner.world import engine_ranks, num_engines, training_ranks
from hybridrl.config.policy_losses import responses_per_target, uses_reference
from hybridrl.config.schema import RunConfig

# Shares of the peak in updates and forwards, with compiled and with eager layers.
MFU, EAGER_MFU = 0.5, 0.4
# Host time of a decoding step, and of a sequence in it; hosts with slow cores take twice as long.
DECODE_S, DECODE_SEQUENCE_S = 1.5e-3, 7.8e-6
# Bytes per second that a rank exchanges with others: NVLink (measured), and between nodes (400
# Gb/s a GPU, assumed).
NVLINK, NETWORK = 264e9, 50e9
# Bytes per second between GPU and pinned host memory.
TO_HOST = 53e9
# Bytes per second of mapping vLLM's memory and freeing it: 67 GiB took 0.29 s and as long again.
MAPPING = 125e9
# Time that a micro-batch of half the tokens adds: smaller products. Assumed; with slow cores, whose
# time for a layer then counts, 1.5 B parameters took 0.2 more with 8,192 tokens.
HALVING = 0.02
# Tokens of the micro-batches that the rates were measured with.
MEASURED_TOKENS = 16384
# Share of a step for sleep and wake-up of vLLM, rewards and scheduling: 7 to 10 % measured.
OUTSIDE = 0.08
# Name of a part.
EXCHANGE = "exchange of weights and gradients"


def step_seconds(
    config: RunConfig, shape: ModelShape, frozen: Frozen, gpu: GPU
) -> dict[str, float]:
    """Estimate a step: part -> seconds. An unknown GPU counts as an H100."""
    sheet = data_sheet(gpu.name) or H100
    rollout = {"rollout": _rollout(config, shape, sheet, gpu)}
    training = {
        **_training(config, shape, frozen, sheet),
        EXCHANGE: _exchange(config, shape),
        "offload": _offload(config, shape, frozen),
    }
    parts = rollout | training | {"sleep of vLLM": _sleep(config, shape, gpu)}
    if is_supervised(config):  # samples only for evaluation
        update = "update critic" if trains_reward_model(config) else "update actor"
        parts = {name: training[name] for name in (update, EXCHANGE, "offload")}
    if engine_ranks(config) and config.rollout.max_versions:  # the slower ranks decide
        parts = max(rollout, training, key=lambda lane: sum(lane.values()))
    outside = sum(parts.values()) * OUTSIDE / (1 - OUTSIDE)
    return {name: seconds for name, seconds in parts.items() if seconds} | {"other": outside}


def _sleep(config: RunConfig, shape: ModelShape, gpu: GPU) -> float:
    """Return the time in which vLLM frees memory and maps it again, by rollout.sleep."""
    awake = rollout_parts(config, shape, gpu.memory_bytes)
    weights = awake.pop("rollout weights")
    cache = sum(size for name, size in awake.items() if name != VLLM_BUFFERS)
    freed = {SleepMode.none: 0, SleepMode.kv_cache: cache, SleepMode.all: cache + weights}
    return freed[config.rollout.sleep] / MAPPING


def _rollout(config: RunConfig, shape: ModelShape, sheet: DataSheet, gpu: GPU) -> float:
    """Return the time of prefill and of all decoding steps of one engine."""
    rollout, tp = config.rollout, config.rollout.tensor_parallel_size
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    prompts = -(-config.data.prompts_per_step // num_engines(config))
    sequences = prompts * rollout.responses_per_prompt
    of_token = token_cache_bytes(config, shape)
    awake = rollout_parts(config, shape, gpu.memory_bytes)
    cache = awake.get(LEFT_FOR_CACHE, awake.get("KV cache", 0))
    room = max(1.0, cache / (longest * of_token))
    together = min(sequences, rollout.max_num_seqs or sequences, room)
    products = 2 * shape.active_parameters * together / tp / (sheet.peak * MFU)
    products /= 1 + (rollout.weights is RolloutWeights.fp8)
    weights = awake["rollout weights"] / sheet.bandwidth
    context = rollout.max_prompt_tokens + rollout.max_response_tokens / 2
    read = together * context * of_token / sheet.bandwidth
    step = DECODE_S + DECODE_SEQUENCE_S * together + max(products, weights) + read
    longest_prompt = rollout.max_prompt_tokens
    attention = prompts * attention_flops(shape, longest_prompt)
    prefill = forward_flops(shape, prompts * longest_prompt, attention)
    steps = rollout.max_response_tokens * sequences / together
    return steps * step + prefill / (tp * sheet.peak * MFU)


def _training(
    config: RunConfig, shape: ModelShape, frozen: Frozen, sheet: DataSheet
) -> dict[str, float]:
    """Return the time of forwards and updates of all roles, without exchange."""
    actor, fsdp = config.actor, config.fsdp
    computed = _computed(config, shape)
    rate = sheet.peak * (MFU if fsdp.compile else EAGER_MFU) * training_ranks(config)
    halvings = math.log2(max(1.0, MEASURED_TOKENS / workload(config).tokens))
    rate /= 1 + HALVING * halvings
    forward = forward_flops(shape, *computed) / rate
    trains_all = config.lora is None
    update = training_flops(shape, *computed, trains_all=trains_all) / rate
    again = forward if fsdp.activation_checkpointing else 0.0
    parts = {"old log-probs": forward, "update actor": actor.epochs * (update + again)}
    if uses_reference(config):
        parts["reference"] = forward
    if uses_critic(config):
        whole = training_flops(shape, *computed) / rate
        parts |= {"values": forward, "update critic": actor.epochs * (whole + again)}
    for model in frozen:
        parts[model.name] = forward_flops(model.shape, *_computed(config, model.shape)) / rate
    return parts


def _longest(config: RunConfig) -> tuple[int, int]:
    return config.rollout.max_prompt_tokens, config.rollout.max_response_tokens


def _computed(config: RunConfig, shape: ModelShape) -> tuple[float, float]:
    """Return the tokens that a forward of the batch computes, and its operations in attention."""
    prompt, answer = _longest(config)
    sequences = config.data.prompts_per_step * config.rollout.responses_per_prompt
    sequences *= responses_per_target(config)
    once = sequences * _without_prompt(config, shape)
    attention = sequences * attention_flops(shape, prompt + answer)
    attention -= once * attention_flops(shape, prompt)
    return sequences * (prompt + answer) - once * prompt, attention


def _without_prompt(config: RunConfig, shape: ModelShape) -> float:
    """Return the share of sequences whose prompt another one of their unit has."""
    prompt, answer = _longest(config)
    if not config.fsdp.share_prefixes or prompt < LEAST_SHARED * (prompt + answer):
        return 0.0
    targets = responses_per_target(config)
    each = answer + key_share(shape, config.fsdp) * prompt
    room = 1 + int((config.actor.max_tokens_per_gpu - prompt - answer) / each)
    units = UNITS_PER_RANK * training_ranks(config)
    most = int(config.actor.mini_batch_size) * targets // units
    group = config.rollout.responses_per_prompt * targets
    return 1 - 1 / max(1, min(group, room, most))


def _exchange(config: RunConfig, shape: ModelShape) -> float:
    """Return the time of gathering weights and reducing gradients in all updates of a step."""
    fsdp, actor = config.fsdp, config.actor
    link = NVLINK if config.cluster.nodes == 1 else NETWORK
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    updates = actor.epochs * responses / actor.mini_batch_size
    whole = responses * responses_per_target(config) * sum(_longest(config))
    computed = _computed(config, shape)[0] / whole
    micro_batches = math.ceil(workload(config).micro_batches * computed)
    is_full = fsdp.accumulation is Accumulation.full
    gathers = 2 * micro_batches  # forward and backward
    if not fsdp.reshard_after_forward:
        gathers = 1 if is_full else micro_batches
    reduces = 1 if is_full else micro_batches
    moved = sum(
        gathers * BYTES[fsdp.param_dtype] * role.held
        + reduces * BYTES[fsdp.reduce_dtype] * role.trained
        for role in roles_of(config, shape)
        if role.trained
    )
    return updates * moved * (1 - 1 / fsdp.shards) / link


def _offload(config: RunConfig, shape: ModelShape, frozen: Frozen) -> float:
    """Return the time in which weights and moments move to the host and back, once a step."""
    if config.fsdp.offload is Offload.none:
        return 0.0
    weights = MASTER_BYTES * (config.fsdp.offload is Offload.idle_all)
    moved = sum(
        weights * role.held + ADAM_BYTES * role.trained for role in roles_of(config, shape, frozen)
    )
    return 2 * moved / config.fsdp.shards / TO_HOST
