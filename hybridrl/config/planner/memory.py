"""Predicted memory of one rank in each phase of a step, on a GPU or in RAM.

Weights and optimizer state are counted, activations and gradients estimated (training_memory.py),
processes measured constants. Target: 15 % of the peak of a full micro-batch, without the
allocator's reserve. On CPUs activations are a lower bound: attention pads there.

Units: bytes, of one rank unless said otherwise.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config.choices import Offload, RolloutWeights, SleepMode
from hybridrl.config.estimators import trains_reward_model, uses_critic
from hybridrl.config.planner.machine import GIB, Machine
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.planner.training_memory import BYTES, MASTER_BYTES, TrainingMemory, Workload
from hybridrl.config.planner.world import engine_ranks, num_engines, slots_on_nodes, training_ranks
from hybridrl.config.policy_losses import responses_per_target, uses_reference
from hybridrl.config.schema import RunConfig

MIB = 2**20
# Resident set of a worker with torch, transformers and vLLM (0.6 GiB) and its pools.
CPU_PROCESS_BYTES = GIB
# The driver, Ray's own processes and its object store on a node.
CPU_DRIVER_BYTES = GIB + GIB // 2
# What a process takes beside torch's tensors: CUDA context, NCCL's buffers, kernels of torch, vLLM
# and FlashAttention 4, CUDA graphs (H100, vLLM 0.33, torch 2.14).
GPU_PROCESS_BYTES = 7 * GIB // 2
# Host memory of a GPU's worker process: torch, vLLM and CUDA's libraries.
GPU_PROCESS_RAM_BYTES = 4 * GIB
# Phase of forwards; with a model's name of a frozen one, whose activations are not the policy's.
SCORE = "score"
# Activations and logits of vLLM during generation; assumed, not measured.
VLLM_BUFFER_BYTES = 2 * GIB
# vLLM's share of a GPU without its weights.
LEFT_FOR_CACHE = "KV cache and vLLM's buffers"
VLLM_BUFFERS = "vLLM's buffers"
# Tokens that a sequence's cache may have beyond its own: blocks have 16.
CACHE_BLOCK = 16
# Logits of both models for a token and an id of a chunk in bfloat16, and four float32 numbers.
DIVERGENCE_BYTES = 20
# Adam's two moments are float32.
ADAM_BYTES = 8


@dataclass(frozen=True)
class Phase:
    """Memory of one rank in a phase of the step: part -> bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def largest(phases: Iterable[Phase]) -> Phase:
    """Return the phase with the most memory."""
    return max(phases, key=lambda phase: phase.total)


class Role(NamedTuple):
    """A role with a model: elements on all ranks that are held, and that have AdamW moments."""

    name: str
    held: int
    trained: int = 0


def roles_of(config: RunConfig, shape: ModelShape, frozen: Frozen = ()) -> list[Role]:
    """Return the roles with sharded weights."""
    lora, adapters = config.lora, 0
    if lora is not None:
        adapters = shape.adapter_parameters(lora.rank, lora.target_modules)
    tower = shape.vision.parameters
    trained = adapters or shape.parameters - tower * (not config.actor.train_vision)
    trained *= not trains_reward_model(config)
    roles = [Role("actor", shape.parameters + adapters, trained)]
    if uses_critic(config):
        # The backbone and a scalar head with bias.
        parameters = shape.backbone_parameters + shape.hidden + 1
        roles.append(Role("critic", parameters, parameters - tower))
    if uses_reference(config) and not adapters:  # with adapters it is the actor without them
        roles.append(Role("ref", shape.parameters))
    return roles + [Role(model.name, model.parameters) for model in frozen]


def rank_phases(
    config: RunConfig,
    shape: ModelShape,
    gpu_bytes: int | None,
    frozen: Frozen = (),
) -> list[Phase]:
    """Predict one rank's memory in each phase; `gpu_bytes` is None for a CPU slot.

    With placement.rollout_gpus the second phase, the rollout, is on ranks that only sample, the
    others on those that only train.
    """
    roles = roles_of(config, shape, frozen)
    process = {"process": CPU_PROCESS_BYTES if gpu_bytes is None else GPU_PROCESS_BYTES}
    if gpu_bytes is None:
        process["checkpoint staging"] = staged_bytes(config, shape)
        process["teachers' states"] = _teacher_states(config, frozen)
    rollout = rollout_parts(config, shape, gpu_bytes)
    weights = {"rollout weights": rollout["rollout weights"]}
    buckets = {"buckets": 2 * min(config.rollout.reshard_bucket_mb * MIB, *weights.values())}
    # vLLM's share of a GPU includes its process.
    awake = rollout if LEFT_FOR_CACHE in rollout else process | rollout
    if engine_ranks(config):
        with_engine, asleep = {"shadow copy": weights.pop("rollout weights")} | buckets, process
    else:
        with_engine = _resident(config, roles, None)
        asleep = process | _asleep(config, rollout, gpu_bytes)
    work = workload(config)
    lora, tower = config.lora, config.actor.train_vision
    policy = TrainingMemory(config.fsdp, shape, work, has_head=True, lora=lora, train_vision=tower)
    resident = _resident(config, roles, "actor")
    phases = [
        Phase("reshard", resident | asleep | weights | buckets),
        Phase("rollout", with_engine | awake),
        Phase(SCORE, resident | asleep | policy.score()),
    ]
    for model in frozen:
        scoring = TrainingMemory(config.fsdp, model.shape, work, has_head=model.has_head)
        parts = _resident(config, roles, model.name) | asleep | scoring.score()
        phases.append(Phase(f"{SCORE} {model.name}", parts))
    for role in sorted(roles, key=lambda role: role.name == "actor"):  # the critic comes first
        if role.trained:
            critic = TrainingMemory(config.fsdp, shape, work, has_head=False)
            training = policy if role.name == "actor" else critic
            parts = _resident(config, roles, role.name, updates=True) | asleep | training.update()
            if config.teacher is not None and (teachers := _compared(config, frozen)):
                heads = sum(teacher.vocab * teacher.hidden for teacher in teachers)
                parts["teachers' heads"] = BYTES[config.fsdp.param_dtype] * heads
                if role.name == "actor":
                    tokens = min(config.teacher.divergence_chunk_tokens, work.tokens)
                    parts["divergence"] = DIVERGENCE_BYTES * tokens * shape.vocab
            phases.append(Phase(f"update {role.name}", parts))
    return phases


def _teacher_states(config: RunConfig, frozen: Frozen) -> int:
    """Return the RAM for teachers' states of all response tokens that a rank has of a step."""
    responses = config.data.prompts_per_step * config.rollout.responses_per_prompt
    tokens = responses * config.rollout.max_response_tokens // max(1, training_ranks(config))
    widest = max((teacher.hidden for teacher in _compared(config, frozen)), default=0)
    return BYTES[config.fsdp.param_dtype] * tokens * widest


def _compared(config: RunConfig, frozen: Frozen) -> list[ModelShape]:
    """Return the teachers whose distributions are compared over the vocabulary."""
    if config.teacher is None or config.teacher.is_sampled:
        return []
    return [model.shape for model in frozen if model.has_head]


def workload(config: RunConfig) -> Workload:
    """Return the largest forward of one rank, assuming response tokens only."""
    rollout, world = config.rollout, max(1, training_ranks(config))
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    longest *= responses_per_target(config)
    budget = max(config.actor.max_tokens_per_gpu, -(-longest // config.fsdp.ulysses_size))
    mini_batch = -(-int(config.actor.mini_batch_size) * longest // world)
    tokens, prompt = min(budget, mini_batch), rollout.max_prompt_tokens
    return Workload(
        tokens=tokens,
        micro_batches=-(-mini_batch // budget),
        chunk_tokens=config.actor.log_prob_chunk_tokens,
        image_tokens=tokens * prompt * responses_per_target(config) // longest,
    )


def pinned_bytes(config: RunConfig, shape: ModelShape, frozen: Frozen = ()) -> int:
    """Return the page-locked host memory of one rank for fsdp.offload."""
    total = 0
    for role in roles_of(config, shape, frozen):
        weights = role.held if config.fsdp.offload is Offload.idle_all else 0
        moments = role.trained if config.fsdp.offload is not Offload.none else 0
        for size in (MASTER_BYTES * weights, ADAM_BYTES * moments):
            total += -(-size // config.fsdp.shards // MIB) * MIB
    return total


def staged_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return a rank's host memory of the checkpoints' staging buffer; page-locked with GPUs."""
    if not config.checkpoint.every_steps:
        return 0
    trained = sum(role.trained for role in roles_of(config, shape))
    return (MASTER_BYTES + ADAM_BYTES) * trained // config.fsdp.shards


def host_parts(config: RunConfig, shape: ModelShape, frozen: Frozen = ()) -> dict[str, int]:
    """Predict the host memory of one rank with a GPU: part -> bytes.

    Model files are memory-mapped; only non-contiguous slices of one tensor at a time are copied.
    """
    weight = max(shape.embedding_parameters, shape.hidden * shape.intermediate)
    if shape.experts:  # a projection of all experts is one weight
        weight = max(weight, 2 * shape.experts.number * shape.experts.inner * shape.hidden)
    return {
        "process": GPU_PROCESS_RAM_BYTES,
        "loading": MASTER_BYTES * weight // config.fsdp.shards,
        "offload": pinned_bytes(config, shape, frozen),
        "checkpoint staging": staged_bytes(config, shape),
        "teachers' states": _teacher_states(config, frozen),
    }


def on_node(slots: int, per_rank: int) -> int:
    """Return the RAM of this number of workers on a node, with the driver."""
    return slots * per_rank + CPU_DRIVER_BYTES


def tightest_node(config: RunConfig, machine: Machine, per_rank: int) -> tuple[int, int, int]:
    """Return (ranks, needed RAM, available RAM) of the node with the least spare RAM.

    The largest demand is placed on the largest node.
    """
    demand = sorted(slots_on_nodes(config), reverse=True)
    sizes = sorted((node.memory_bytes for node in machine.nodes), reverse=True)
    nodes = zip(demand, sizes, strict=False)
    triples = [(slots, on_node(slots, per_rank), there) for slots, there in nodes]
    return max(triples, key=lambda triple: triple[1] - triple[2])


def _resident(
    config: RunConfig, roles: list[Role], active: str | None, *, updates: bool = False
) -> dict[str, int]:
    """Return the shards on the device while the `active` role (None: the rollout) runs."""
    offload, shards = config.fsdp.offload, config.fsdp.shards
    parts = {}
    for role in roles:
        if role.name == active or offload is not Offload.idle_all:
            parts[f"{role.name} weights"] = MASTER_BYTES * role.held // shards
        if role.trained and (offload is Offload.none or (role.name == active and updates)):
            parts[f"{role.name} AdamW"] = ADAM_BYTES * role.trained // shards
    return parts


def rollout_parts(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> dict[str, int]:
    """Return vLLM's memory during generation."""
    size, is_fp8 = BYTES[config.rollout.dtype], config.rollout.weights is RolloutWeights.fp8
    saved = (size - 1) * shape.layer_parameters * shape.layers * is_fp8
    weights = (size * shape.parameters - saved) // config.rollout.tensor_parallel_size
    if config.rollout.kv_cache_mb is not None:
        parts = {"rollout weights": weights, "KV cache": config.rollout.kv_cache_mb * MIB}
        return parts if gpu_bytes is None else parts | {VLLM_BUFFERS: VLLM_BUFFER_BYTES}
    if gpu_bytes is None:
        return {"rollout weights": weights}
    budget = int(config.rollout.gpu_memory_utilization * gpu_bytes)
    return {"rollout weights": weights, LEFT_FOR_CACHE: max(0, budget - weights)}


def token_cache_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the KV cache of a token on one rank."""
    tp = config.rollout.tensor_parallel_size
    return BYTES[config.rollout.dtype] * sum(n * kind.cached(tp) for kind, n in shape.counted)


def useful_cache_mb(config: RunConfig, shape: ModelShape) -> int:
    """Return the MiB of KV cache that a step can use: its responses together, at full length."""
    rollout = config.rollout
    prompts = -(-config.data.prompts_per_step // num_engines(config))
    sequences = max(rollout.max_num_seqs or 0, prompts * rollout.responses_per_prompt)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens + CACHE_BLOCK
    return -(-sequences * longest * token_cache_bytes(config, shape) // MIB)


def _asleep(config: RunConfig, rollout: dict[str, int], gpu_bytes: int | None) -> dict[str, int]:
    """Return vLLM's memory between rollouts, by rollout.sleep; on CPU vLLM cannot sleep."""
    if gpu_bytes is None or config.rollout.sleep is SleepMode.none:
        return {name: size for name, size in rollout.items() if name != VLLM_BUFFERS}
    if config.rollout.sleep is SleepMode.kv_cache:
        return {"rollout weights": rollout["rollout weights"]}
    return {}


def gib(size: float) -> str:
    """Return '3.2 GiB' or '64 MiB'."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def listed_parts(parts: dict[str, int]) -> str:
    """Return 'actor weights 4.0 GiB, ...': parts of at least 2 %, largest first."""
    least = 0.02 * sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in ordered if size >= least)


def describe(phase: Phase) -> str:
    """Return '12.3 GiB (actor weights 4.0 GiB, ...)', largest first, without small parts."""
    return f"{gib(phase.total)} ({listed_parts(phase.parts)})"
