"""Enumerations of config values."""

from enum import StrEnum


# OmegaConf parses enum members by name, so names and values are equal.
class KLPlacement(StrEnum):
    """Placement of the penalty against the reference."""

    reward = "reward"
    loss = "loss"


class KLEstimator(StrEnum):
    """Estimators of the KL divergence per token (algorithms/kl.py)."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k1_straight_through = "k1_straight_through"
    k3_straight_through = "k3_straight_through"


class Aggregation(StrEnum):
    """Aggregation of token losses to the loss of a mini-batch (algorithms/aggregation.py)."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"


class CorrectionMethod(StrEnum):
    """Correction of the mismatch between vLLM's and the trainer's probabilities."""

    none = "none"
    truncate = "truncate"
    mask = "mask"


class CorrectionLevel(StrEnum):
    """Unit of an importance ratio (algorithms/rollout_correction.py)."""

    token = "token"
    sequence = "sequence"
    sequence_mean = "sequence_mean"


class LRSchedule(StrEnum):
    """Learning-rate schedule after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Accelerator(StrEnum):
    """Device of the workers."""

    cpu = "cpu"
    gpu = "gpu"


class DType(StrEnum):
    """Floating-point types by torch's names."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Layout(StrEnum):
    """Layout of FSDP shards (config/planner/shard_order.py, distributed/columns.py)."""

    aligned = "aligned"
    plain = "plain"


class Accumulation(StrEnum):
    """Gradients accumulated over micro-batches: full or sharded (distributed/accumulation.py)."""

    full = "full"
    sharded = "sharded"


class Offload(StrEnum):
    """State that is offloaded to pinned host memory while unused."""

    none = "none"
    idle_optimizer = "idle_optimizer"
    idle_all = "idle_all"


class NVLinkMulticast(StrEnum):
    """NVLink multicast: reductions inside the switches (config/planner/multicast.py)."""

    auto = "auto"
    off = "off"


class DoctorChecks(StrEnum):
    """Checks of the machines that a run makes."""

    quick = "quick"
    full = "full"
    none = "none"


class Init(StrEnum):
    """Source of a model's initial weights."""

    pretrained = "pretrained"
    random = "random"


class SleepMode(StrEnum):
    """Memory that vLLM frees between rollouts."""

    none = "none"
    kv_cache = "kv_cache"
    all = "all"


class TooLongPrompts(StrEnum):
    """Treatment of prompts longer than rollout.max_prompt_tokens."""

    error = "error"
    drop = "drop"


class Repeated(StrEnum):
    """Treatment of training problems with a repeated question."""

    keep = "keep"
    drop = "drop"
