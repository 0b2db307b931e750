"""The typed configuration. Defaults and comments stand in conf/*.yaml only; here are types.

A role's worker class names its dataclass as `config_class`; a subclass of both may add keys.
"""

from dataclasses import dataclass
from typing import Any

from hybridrl.config.algorithm_schema import AlgorithmConfig
from hybridrl.config.choices import (
    Accelerator,
    Accumulation,
    DoctorChecks,
    DType,
    Init,
    Layout,
    LRSchedule,
    NVLinkMulticast,
    Offload,
    SleepMode,
)
from hybridrl.config.data_schema import DataConfig


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
    rendezvous_ports: list[int]
    start_timeout_s: float
    stall_timeout_s: float
    nvlink_multicast: NVLinkMulticast


@dataclass(kw_only=True)
class PlacementConfig:
    """conf/placement. slots_on_nodes is null where all nodes are alike."""

    slots_on_nodes: list[int] | None
    allow_straddle: bool


@dataclass(kw_only=True)
class DoctorConfig:
    """conf/doctor."""

    checks: DoctorChecks
    minimal_training: bool


@dataclass(kw_only=True)
class LoRAConfig:
    """conf/lora: low-rank adapters of the actor."""

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
    lora: LoRAConfig | None
    algorithm: AlgorithmConfig
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
    value_clip: float
    optim: OptimConfig


@dataclass(kw_only=True)
class ReferenceConfig(RoleConfig):
    """conf/ref."""

    model: ModelConfig
    fsdp: FSDPConfig
    lora: LoRAConfig | None
    temperature: float
    log_prob_chunk_tokens: int


@dataclass(kw_only=True)
class ModelPathConfig:
    """conf/reward_model: model, a folder of its own."""

    path: str


@dataclass(kw_only=True)
class RewardModelConfig(RoleConfig):
    """conf/reward_model."""

    model: ModelPathConfig
    fsdp: FSDPConfig
    weight: float


@dataclass(kw_only=True)
class RolloutConfig(RoleConfig):
    """conf/rollout. max_num_seqs may be null before it is resolved."""

    model: ModelConfig
    lora: LoRAConfig | None
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
    save_final_model: bool
    max_skipped_steps: int
    max_restarts: int
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
class CheckpointConfig:
    """conf/checkpoint. on_sigterm is in seconds."""

    every_steps: int
    keep_last: int
    keep_best: str | None
    on_sigterm: float
    allow_config_changes: bool


@dataclass(kw_only=True)
class SaverConfig(RoleConfig):
    """Of the role that writes checkpoints; made in code, no section of its own.

    `prepares`: whether it has host memory for them from the start, which takes a while on GPUs.
    """

    prepares: bool


@dataclass(kw_only=True)
class RunConfig:
    """One run, whole and resolved: no interpolations, no nulls that mean "derive it".

    Except fsdp.columns, which is known once the rollout engine has been traced.

    Role sections are instances of their workers' `config_class`, which may be a user's subclass;
    `reward_model` is None in a run without one.
    """

    seed: int
    resume: str
    run: RunSection
    hardware: HardwareConfig
    model: ModelConfig
    data: DataConfig
    fsdp: FSDPConfig
    cluster: ClusterConfig
    placement: PlacementConfig
    algorithm: AlgorithmConfig
    lora: LoRAConfig | None
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
    checkpoint: CheckpointConfig
    doctor: DoctorConfig
