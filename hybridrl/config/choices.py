"""Values that keys of the configuration may take, each a word."""

from enum import StrEnum


# OmegaConf takes enum members by their names, so names and values are the same words.
class KLPlacement(StrEnum):
    """Where the penalty against the reference acts."""

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
    """How the losses of tokens become the loss of a mini-batch (algorithms/aggregation.py)."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    sequence_sum = "sequence_sum"


class CorrectionMethod(StrEnum):
    """What is done about tokens that the trainer finds likelier or less likely than vLLM did."""

    none = "none"
    truncate = "truncate"
    mask = "mask"


class CorrectionLevel(StrEnum):
    """What an importance ratio is of (algorithms/rollout_correction.py)."""

    token = "token"
    sequence = "sequence"
    sequence_mean = "sequence_mean"


class LRSchedule(StrEnum):
    """Course of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Accelerator(StrEnum):
    """The device workers use."""

    cpu = "cpu"
    gpu = "gpu"


class DType(StrEnum):
    """Floating-point types by torch's names."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Layout(StrEnum):
    """How FSDP shards lie (config/planner/layout.py, distributed/columns.py)."""

    aligned = "aligned"
    plain = "plain"


class Accumulation(StrEnum):
    """What adds up over the micro-batches of an optimizer step (distributed/accumulation.py)."""

    full = "full"
    sharded = "sharded"


class Offload(StrEnum):
    """What lies in pinned host memory while the current phase does not use it."""

    none = "none"
    idle_optimizer = "idle_optimizer"
    idle_all = "idle_all"


class NVLinkMulticast(StrEnum):
    """Whether NCCL and vLLM may reduce inside the NVLink switches (config/planner/multicast.py)."""

    auto = "auto"
    off = "off"


class DoctorChecks(StrEnum):
    """What a run checks of its machines by itself."""

    quick = "quick"
    full = "full"
    none = "none"


class Init(StrEnum):
    """Where a model's first weights come from."""

    pretrained = "pretrained"
    random = "random"


class SleepMode(StrEnum):
    """What vLLM gives back between rollouts."""

    none = "none"
    kv_cache = "kv_cache"
    all = "all"


class TooLongPrompts(StrEnum):
    """What a prompt longer than rollout.max_prompt_tokens gets."""

    error = "error"
    drop = "drop"


class Repeated(StrEnum):
    """What a training problem gets whose question is there already."""

    keep = "keep"
    drop = "drop"
