"""What a run needs of each GPU, or of RAM where there is none, phase by phase.

Weights, gradients and optimizer states are exact; activations are a lower bound (what autograd must
keep), so that a run refused here could not have fitted.

Units: bytes, of one rank unless said otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.config.estimators import uses_critic
from hybridrl.config.machine import GIB, Machine
from hybridrl.config.model_shape import ModelShape
from hybridrl.config.schema import Accelerator, DType, RunConfig

MIB = 2**20
BYTES = {DType.float32: 4, DType.bfloat16: 2}
# Resident set of a worker with torch, transformers and vLLM loaded (0.6 GiB) and its pools.
CPU_PROCESS_BYTES = GIB
# The driver, Ray's own processes and its object store on a node.
CPU_DRIVER_BYTES = GIB + GIB // 2
# CUDA context, NCCL buffers and workspaces of a process.
GPU_CONTEXT_BYTES = GIB + GIB // 2
# Adam's two moments and the master weights are float32.
MASTER_BYTES, ADAM_BYTES, GRADIENT_BYTES = 4, 8, 4


@dataclass(frozen=True)
class Phase:
    """What one rank holds in a phase of the step: what it is -> bytes."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def rank_phases(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> list[Phase]:
    """One rank's memory in each phase.

    Args:
        config: resolved.
        shape: the model's.
        gpu_bytes: memory of the smallest GPU; None for a CPU slot.
    """
    always = _always(config, shape, gpu_bytes)
    rollout = _rollout(config, shape, gpu_bytes)
    # On a GPU vLLM sleeps while the trainer computes; on CPU it cannot.
    idle = {} if gpu_bytes is not None else rollout
    weights = {"rollout weights": _rollout_weights(config, shape)}
    bucket = min(config.rollout.reshard_bucket_mb * MIB, _rollout_weights(config, shape))
    buckets = {"buckets": 2 * bucket}
    phases = [
        Phase("reshard", always | idle | weights | buckets),
        Phase("rollout", always | rollout),
        Phase("score", always | idle | _forward(config, shape)),
    ]
    if uses_critic(config):
        update = _backward(config, shape, _critic_parameters(shape), head=False)
        phases.append(Phase("update critic", always | idle | update))
    update = _backward(config, shape, shape.parameters, head=True)
    return [*phases, Phase("update actor", always | idle | update)]


def node_peak(config: RunConfig, phases: list[Phase]) -> int:
    """RAM that the CPU slots of one node and the driver need together."""
    assert config.cluster.gpus_per_node is not None
    peak = max(phase.total for phase in phases)
    return config.cluster.gpus_per_node * peak + CPU_DRIVER_BYTES


def memory_problems(config: RunConfig, shape: ModelShape, machine: Machine) -> Iterator[str]:
    """Why the run cannot fit, if so: one text for GPUs or for RAM."""
    if config.hardware.accelerator is Accelerator.gpu:
        if machine.gpus:
            gpu_bytes = min(gpu.memory_bytes for gpu in machine.gpus)
            yield from _gpu_problems(config, rank_phases(config, shape, gpu_bytes), gpu_bytes)
        return
    phases = rank_phases(config, shape, None)
    available = min(node.memory_bytes for node in machine.nodes)
    needed = node_peak(config, phases)
    if needed > available:
        worst = max(phases, key=lambda phase: phase.total)
        yield (
            f"cluster.gpus_per_node = {config.cluster.gpus_per_node} CPU slots need at least "
            f"{gib(needed)} of RAM, the node has {gib(available)}: a slot's peak is "
            f"{describe(worst)}.\n"
            f"Lower cluster.gpus_per_node, rollout.kv_cache_mb or actor.max_tokens_per_gpu, or "
            f"name a smaller model."
        )


def _gpu_problems(config: RunConfig, phases: list[Phase], gpu_bytes: int) -> Iterator[str]:
    for phase in phases:
        if phase.total <= gpu_bytes:
            continue
        if phase.name == "rollout":
            share = config.rollout.gpu_memory_utilization
            yield (
                f"rollout.gpu_memory_utilization = {share}: vLLM and what the other roles keep "
                f"need {describe(phase)}, the GPU has {gib(gpu_bytes)}.\n"
                f"Lower rollout.gpu_memory_utilization, or spread the weights over more GPUs "
                f"(cluster.gpus_per_node, fsdp.dp_shard)."
            )
        else:
            yield (
                f"model.path = {config.model.path}: {phase.name} needs at least "
                f"{describe(phase)}, the GPU has {gib(gpu_bytes)}.\n"
                f"Take more GPUs (cluster.gpus_per_node, fsdp.dp_shard), lower "
                f"actor.max_tokens_per_gpu, set fsdp.activation_checkpointing=true, or name a "
                f"smaller model."
            )
    budget = int(config.rollout.gpu_memory_utilization * gpu_bytes)
    weights = phases[0].parts["rollout weights"]
    if config.rollout.kv_cache_mb is None and weights >= budget:
        yield (
            f"rollout.gpu_memory_utilization = {config.rollout.gpu_memory_utilization} gives vLLM "
            f"{gib(budget)}, but its weights alone take {gib(weights)}.\n"
            f"Raise it, or raise rollout.tensor_parallel_size."
        )


def _always(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> dict[str, int]:
    """Shards that stay in every phase, and what the process itself takes."""
    shards = config.fsdp.dp_shard
    assert shards is not None
    process = CPU_PROCESS_BYTES if gpu_bytes is None else GPU_CONTEXT_BYTES
    state = MASTER_BYTES + ADAM_BYTES
    parts = {
        "process": process,
        "actor weights and AdamW": state * shape.parameters // shards,
    }
    if uses_critic(config):
        parts["critic weights and AdamW"] = state * _critic_parameters(shape) // shards
    if config.algorithm.kl.coef > 0:
        parts["ref weights"] = MASTER_BYTES * shape.parameters // shards
    return parts


def _critic_parameters(shape: ModelShape) -> int:
    """Elements of the backbone and a scalar head with bias."""
    return shape.backbone_parameters + shape.hidden + 1


def _rollout_weights(config: RunConfig, shape: ModelShape) -> int:
    return BYTES[config.rollout.dtype] * shape.parameters // config.rollout.tensor_parallel_size


def _rollout(config: RunConfig, shape: ModelShape, gpu_bytes: int | None) -> dict[str, int]:
    """What vLLM holds while it generates."""
    weights = _rollout_weights(config, shape)
    if config.rollout.kv_cache_mb is not None:
        return {"rollout weights": weights, "KV cache": config.rollout.kv_cache_mb * MIB}
    if gpu_bytes is None:
        return {"rollout weights": weights}
    budget = int(config.rollout.gpu_memory_utilization * gpu_bytes)
    return {"rollout weights": weights, "KV cache and vLLM's buffers": max(0, budget - weights)}


def _gathered(config: RunConfig, shape: ModelShape) -> int:
    """Weights that FSDP has gathered at one time: all of them, or the root's and two layers'."""
    size = BYTES[config.fsdp.param_dtype]
    if not config.fsdp.reshard_after_forward:
        return size * shape.parameters
    return size * (
        shape.parameters - (shape.layers - min(2, shape.layers)) * shape.layer_parameters
    )


def _logits(config: RunConfig, shape: ModelShape) -> int:
    """Logits of a chunk in float32, and once more for their exponentials or gradients."""
    chunk = min(config.actor.log_prob_chunk_tokens, config.actor.max_tokens_per_gpu)
    return 2 * 4 * chunk * shape.vocab


def _layer_activations(config: RunConfig, shape: ModelShape) -> int:
    """What autograd keeps of one layer for a packed forward of max_tokens_per_gpu tokens."""
    size = BYTES[config.fsdp.param_dtype]
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    per_token = size * (4 * shape.hidden + heads + 4 * shape.intermediate)
    return config.actor.max_tokens_per_gpu * per_token


def _forward(config: RunConfig, shape: ModelShape) -> dict[str, int]:
    return {
        "gathered weights": _gathered(config, shape),
        "activations": _layer_activations(config, shape),
        "logits": _logits(config, shape),
    }


def _backward(config: RunConfig, shape: ModelShape, elements: int, head: bool) -> dict[str, int]:
    shards = config.fsdp.dp_shard
    assert shards is not None
    layer = _layer_activations(config, shape)
    kept = config.actor.max_tokens_per_gpu * shape.hidden * BYTES[config.fsdp.param_dtype]
    checkpointing = config.fsdp.activation_checkpointing
    parts = {
        "gradients": GRADIENT_BYTES * elements // shards,
        "gathered weights": _gathered(config, shape),
        "activations": shape.layers * kept + layer if checkpointing else shape.layers * layer,
    }
    return parts | ({"logits": _logits(config, shape)} if head else {})


def gib(size: float) -> str:
    """Bytes for readers: '3.2 GiB', '64 MiB'."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def describe(phase: Phase) -> str:
    """'12.3 GiB (actor weights and AdamW 8.0 GiB, ...)', largest first, small parts left out."""
    return f"{gib(phase.total)} ({largest_parts(phase)})"


def largest_parts(phase: Phase) -> str:
    """'actor weights and AdamW 8.0 GiB, ...': parts of at least 1 %, largest first."""
    parts = sorted(phase.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in parts if size * 100 >= phase.total)
