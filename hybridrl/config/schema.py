"""The typed configuration. Defaults and comments stand in conf/*.yaml only; here are types.

A role's worker class names its dataclass as `config_class`; a subclass of both may add keys.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hybridrl.config.data_schema import DataConfig


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


class KLSchedule(StrEnum):
    """How the KL coefficient changes over the run."""

    fixed = "fixed"
    adaptive = "adaptive"


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
    """How FSDP shards lie (config/layout.py, distributed/layout.py)."""

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


class Init(StrEnum):
    """Where a model's first weights come from."""

    pretrained = "pretrained"
    random = "random"


class SleepMode(StrEnum):
    """What vLLM gives back between rollouts."""

    none = "none"
    kv_cache = "kv_cache"
    all = "all"


@dataclass(kw_only=True)
class RunSection:
    """conf/config.yaml: run."""

    name: str
    dry: bool


@dataclass(kw_only=True)
class HardwareConfig:
    """conf/hardware: the device, and why it was chosen."""

    accelerator: Accelerator
    reason: str


@dataclass(kw_only=True)
class ModelConfig:
    """conf/model."""

    path: str
    init: Init
    seed: int


@dataclass(kw_only=True)
class FSDPConfig:
    """conf/fsdp: the one sharding spec.

    dp_shard may be null before it is resolved, columns until the rollout engine has been traced.
    """

    dp_shard: int | None
    dp_replicate: int
    reshard_after_forward: bool
    param_dtype: DType
    reduce_dtype: DType
    activation_checkpointing: bool
    accumulation: Accumulation
    layout: Layout
    tensor_parallel_size: int
    columns: list[str] | None
    ulysses_size: int
    offload: Offload
    compile: bool


@dataclass(kw_only=True)
class ClusterConfig:
    """conf/cluster. gpus_per_node may be null before it is resolved."""

    nodes: int
    gpus_per_node: int | None
    start_timeout_s: float
    call_timeout_s: float


@dataclass(kw_only=True)
class KLConfig:
    """conf/algorithm: kl."""

    placement: KLPlacement
    estimator: KLEstimator
    coef: float
    schedule: KLSchedule
    target: float
    horizon: int


@dataclass(kw_only=True)
class LossConfig:
    """conf/algorithm/loss: the policy loss and its settings."""

    function: str
    args: dict[str, Any]


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """conf/algorithm: rollout_correction."""

    method: CorrectionMethod
    level: CorrectionLevel
    low: float
    high: float


@dataclass(kw_only=True)
class OverlongConfig:
    """conf/algorithm: overlong."""

    buffer_tokens: int
    penalty: float
    train_on_truncated: bool


@dataclass(kw_only=True)
class AlgorithmConfig:
    """conf/algorithm."""

    advantage: str
    gamma: float
    lam: float
    pass_k: int
    whiten_advantages: bool
    loss: LossConfig
    aggregation: Aggregation
    rollout_correction: RolloutCorrectionConfig
    overlong: OverlongConfig
    max_sampling_rounds: int
    kl: KLConfig


@dataclass(kw_only=True)
class LoRAConfig:
    """conf/lora: low-rank adapters of the actor; rank 0 means none."""

    rank: int
    alpha: float
    target_modules: list[str]
    seed: int


@dataclass(kw_only=True)
class OptimConfig:
    """conf/actor and conf/critic: optim."""

    lr: float
    betas: list[float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    schedule: LRSchedule
    warmup_steps: int
    min_lr_ratio: float


@dataclass(kw_only=True)
class RoleConfig:
    """What every role has: its worker class."""

    worker: str


@dataclass(kw_only=True)
class ActorConfig(RoleConfig):
    """conf/actor."""

    model: ModelConfig
    fsdp: FSDPConfig
    lora: LoRAConfig
    kl: KLConfig
    loss: LossConfig
    aggregation: Aggregation
    max_response_tokens: int
    total_steps: int
    temperature: float
    mini_batch_size: int
    epochs: int
    max_tokens_per_gpu: int
    entropy_coef: float
    log_prob_chunk_tokens: int
    optim: OptimConfig


@dataclass(kw_only=True)
class CriticConfig(RoleConfig):
    """conf/critic."""

    model: ModelConfig
    fsdp: FSDPConfig
    total_steps: int
    seed: int
    value_clip: float
    optim: OptimConfig


@dataclass(kw_only=True)
class ReferenceConfig(RoleConfig):
    """conf/ref."""

    model: ModelConfig
    fsdp: FSDPConfig
    lora: LoRAConfig
    temperature: float
    log_prob_chunk_tokens: int


@dataclass(kw_only=True)
class CheckpointConfig:
    """conf/reward_model: model, a checkpoint of its own."""

    path: str


@dataclass(kw_only=True)
class RewardModelConfig(RoleConfig):
    """conf/reward_model."""

    model: CheckpointConfig
    fsdp: FSDPConfig
    weight: float


@dataclass(kw_only=True)
class RolloutConfig(RoleConfig):
    """conf/rollout. max_num_seqs may be null before it is resolved."""

    model: ModelConfig
    seed: int
    tensor_parallel_size: int
    responses_per_prompt: int
    temperature: float
    top_p: float
    max_prompt_tokens: int
    max_response_tokens: int
    dtype: DType
    gpu_memory_utilization: float
    kv_cache_mb: int | None
    max_num_seqs: int | None
    enforce_eager: bool
    sleep: SleepMode
    straggler_ratio: float
    reshard_bucket_mb: int
    verify_reshard: bool


@dataclass(kw_only=True)
class RewardConfig:
    """conf/reward."""

    function: str
    args: dict[str, Any]
    timeout_s: float
    num_processes: int | None
    failed_score: float


@dataclass(kw_only=True)
class EnvironmentConfig:
    """conf/environment: what answers the model between its turns."""

    function: str
    args: dict[str, Any]
    max_turns: int
    stop: list[str]
    role: str


@dataclass(kw_only=True)
class TrainerConfig:
    """conf/trainer."""

    total_steps: int
    critic_warmup_steps: int
    max_log_prob_diff: float
    samples_every_steps: int
    save_rollouts_every_steps: int
    save_final_model: bool
    profile_steps: list[int]


@dataclass(kw_only=True)
class RuleConfig:
    """conf/eval: one more rule by which completions are judged."""

    function: str
    args: dict[str, Any]


@dataclass(kw_only=True)
class EvalConfig:
    """conf/eval."""

    every_steps: int
    greedy: bool
    rules: dict[str, RuleConfig]


@dataclass(kw_only=True)
class TrackingConfig:
    """conf/tracking."""

    tensorboard: bool
    wandb_project: str | None
    mlflow_uri: str | None


@dataclass(kw_only=True)
class RunConfig:
    """One run, whole and resolved: no interpolations, no nulls that mean "derive it".

    Except fsdp.columns, which is known once the rollout engine has been traced.

    Role sections are instances of their workers' `config_class`, which may be a user's subclass;
    `reward_model` is None in a run without one.
    """

    seed: int
    run: RunSection
    hardware: HardwareConfig
    model: ModelConfig
    data: DataConfig
    fsdp: FSDPConfig
    cluster: ClusterConfig
    algorithm: AlgorithmConfig
    lora: LoRAConfig
    actor: Any
    critic: Any
    ref: Any
    rollout: Any
    reward: RewardConfig
    reward_model: Any
    trainer: TrainerConfig
    eval: EvalConfig
    environment: EnvironmentConfig | None
    tracking: TrackingConfig
