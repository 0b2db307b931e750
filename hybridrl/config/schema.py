"""The typed configuration: types, ranges and resume rules. Defaults and comments are in conf/.

`Annotated` fields carry a Range, FREE if a resume may change them, CHOSEN if they may be null, and
Shared if they are no key (annotations.py). A role's worker class names its dataclass as
`config_class`; a subclass of both may add keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hybridrl.config.annotations import (
    BETWEEN_0_AND_1,
    CHOSEN,
    FREE,
    LARGEST_COUNT,
    LONGEST_S,
    SEED,
    Range,
    Section,
    Shared,
    above_zero,
    at_least_one,
    at_least_zero,
    seconds,
    share,
)
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
    RolloutWeights,
    RouterReplay,
    Schedule,
    SleepMode,
    TeacherObjective,
    TeacherTokenizer,
    TopOf,
)
from hybridrl.config.sections import (
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    HealthConfig,
    RewardConfig,
    TrackingConfig,
    TrainerConfig,
)

# Most tokens of a chunk of a divergence, which has several float32 numbers for each id.
DIVERGENCE_TOKENS = 1024
TENSOR_PARALLEL = "rollout.tensor_parallel_size"


@dataclass(kw_only=True)
class RunSection(Section):
    """conf/config.yaml: run."""

    name: str
    dry: bool


@dataclass(kw_only=True)
class HardwareConfig(Section):
    """conf/hardware: the device, and the reason for it."""

    accelerator: Accelerator
    reason: str


@dataclass(kw_only=True)
class ModelConfig(Section):
    """conf/model."""

    path: Annotated[str, FREE]
    init: Init
    seed: Annotated[int, SEED]
    trust_remote_code: Annotated[bool, FREE]


@dataclass(kw_only=True)
class FSDPConfig(Section):
    """conf/fsdp: the one sharding spec.

    dp_shard may be null before `derive`, columns until the rollout engine is traced.
    """

    dp_shard: Annotated[int | None, at_least_one("it counts ranks"), FREE]
    dp_replicate: Annotated[int, at_least_one("it counts copies; 1 means no replication"), FREE]
    reshard_after_forward: Annotated[bool, FREE, CHOSEN]
    param_dtype: DType
    reduce_dtype: DType
    activation_checkpointing: Annotated[bool, FREE, CHOSEN]
    accumulation: Annotated[Accumulation, FREE, CHOSEN]
    layout: Annotated[Layout, FREE]
    tensor_parallel_size: Annotated[
        int, Shared(TENSOR_PARALLEL, "shards are aligned to vLLM's slices"), FREE
    ]
    columns: Annotated[list[str] | None, FREE]
    ulysses_size: Annotated[int, at_least_one("1 means no sequence parallelism"), FREE]
    offload: Annotated[Offload, FREE, CHOSEN]
    compile: Annotated[bool, FREE]
    share_prefixes: Annotated[bool, FREE, CHOSEN]
    exact: Annotated[bool, Shared("rollout.exact", "both sides run the same kernels")]

    @property
    def shards(self) -> int:
        """dp_shard, derived."""
        assert self.dp_shard is not None
        return self.dp_shard


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """conf/cluster. gpus_per_node may be null before `derive`; gpu_memory_gb is in GiB."""

    nodes: Annotated[int, at_least_one("a run needs a node")]
    gpus_per_node: Annotated[int | None, at_least_one("a node needs a process; null is all GPUs")]
    gpu_memory_gb: Annotated[float | None, above_zero("it is the memory of a GPU")]
    rendezvous_ports: Annotated[list[int], Range("lower ports need root", 1024, high=65535)]
    start_timeout_s: Annotated[
        float, seconds("workers need time to start; the longest wait is 3 weeks")
    ]
    stall_timeout_s: Annotated[float, Range("0 disables the stall detector", 0, LONGEST_S)]
    nvlink_multicast: NVLinkMulticast


@dataclass(kw_only=True)
class PlacementConfig(Section):
    """conf/placement. slots_on_nodes is null if all nodes are alike.

    rollout_gpus is null unless rollout.schedule is split.
    """

    slots_on_nodes: Annotated[list[int] | None, at_least_one("each node runs a process")]
    allow_straddle: bool
    rollout_gpus: Annotated[int | None, at_least_one("these ranks sample for the others")]


@dataclass(kw_only=True)
class DoctorConfig(Section):
    """conf/doctor."""

    checks: DoctorChecks
    minimal_training: bool


@dataclass(kw_only=True)
class LoRAConfig(Section):
    """conf/lora: low-rank adapters of the actor."""

    rank: Annotated[int, at_least_one("lora=none trains without adapters")]
    alpha: Annotated[float, above_zero("it scales the update")]
    target_modules: list[str]
    seed: Annotated[int, SEED]


@dataclass(kw_only=True)
class OptimConfig(Section):
    """conf/actor and conf/critic: optim."""

    lr: Annotated[float, share("AdamW needs a positive step; above 1 it diverges", low_open=True)]
    betas: Annotated[list[float], Range("they are decay rates", 0, 1, high_open=True)]
    eps: Annotated[float, above_zero("it prevents a division by zero in AdamW")]
    weight_decay: Annotated[float, Range("a negative decay makes weights grow", 0)]
    max_grad_norm: Annotated[float, above_zero("gradients are scaled down to it")]
    schedule: LRSchedule
    warmup_steps: Annotated[int, at_least_zero("0 means no warm-up")]
    min_lr_ratio: Annotated[float, share("it is a share of the peak learning rate")]


# What roles share reaches them through their constructor (typed.py).
SharedModel = Annotated[ModelConfig, Shared("model", "roles must start from the same weights")]
SharedFSDP = Annotated[
    FSDPConfig,
    Shared("fsdp", "roles must shard alike, or the reshard plan is wrong", is_linked=True),
]
SharedLoRA = Annotated[
    LoRAConfig | None, Shared("lora", "reference and vLLM use the actor's adapters")
]
SharedTemperature = Annotated[
    float, Shared("rollout.temperature", "log-probs must be of the sampled distribution")
]


@dataclass(kw_only=True)
class RoleConfig(Section):
    """Common field of all roles: the worker class."""

    worker: str


@dataclass(kw_only=True)
class ShardedConfig(RoleConfig):
    """Common field of the roles whose weights are sharded by the one spec."""

    fsdp: SharedFSDP


@dataclass(kw_only=True)
class ActorConfig(ShardedConfig):
    """conf/actor. mini_batch_size may be a share of a step's responses before `derive`."""

    model: SharedModel
    lora: SharedLoRA
    algorithm: Annotated[
        AlgorithmConfig, Shared("algorithm", "loss and penalty are checked and reported from there")
    ]
    max_response_tokens: Annotated[int, at_least_one("losses are divided by it")]
    total_steps: Annotated[int, at_least_one("it is the length of the learning-rate schedule")]
    temperature: SharedTemperature
    mini_batch_size: Annotated[
        int | float,
        Range("an optimizer step needs responses", 0, LARGEST_COUNT, low_open=True),
    ]
    epochs: Annotated[int, at_least_one("responses must be used at least once")]
    max_tokens_per_gpu: Annotated[int, at_least_one("a forward needs tokens"), FREE, CHOSEN]
    entropy_coef: Annotated[float, Range("a negative bonus punishes exploration", 0)]
    router_replay: Annotated[
        RouterReplay, Shared("rollout.router_replay", "it uses the experts that vLLM records")
    ]
    router_balance_coef: Annotated[float, Range("a negative loss favours few experts", 0)]
    log_prob_chunk_tokens: Annotated[int, at_least_one("logits are computed chunk by chunk"), FREE]
    train_vision: bool
    optim: OptimConfig


@dataclass(kw_only=True)
class CriticConfig(ShardedConfig):
    """conf/critic."""

    model: SharedModel
    total_steps: Annotated[int, at_least_one("it is the length of the learning-rate schedule")]
    value_clip: Annotated[float, above_zero("values may change by at most this much")]
    optim: OptimConfig


@dataclass(kw_only=True)
class ReferenceConfig(ShardedConfig):
    """conf/ref."""

    model: SharedModel
    lora: SharedLoRA
    temperature: SharedTemperature
    log_prob_chunk_tokens: Annotated[int, at_least_one("logits are computed chunk by chunk"), FREE]


@dataclass(kw_only=True)
class ModelPathConfig(Section):
    """conf/reward_model: model."""

    path: Annotated[str, FREE]


@dataclass(kw_only=True)
class RewardModelConfig(ShardedConfig):
    """conf/reward_model."""

    model: ModelPathConfig
    weight: Annotated[float, Range("scores are multiplied by it")]


@dataclass(kw_only=True)
class TeacherConfig(ShardedConfig):
    """conf/teacher. models is a path, or a mapping of names to paths; null is refused."""

    models: Annotated[Any, FREE]
    init: Init
    seed: Annotated[int, Shared("model.seed", "random weights are those of the policy's seed")]
    tokenizer: TeacherTokenizer
    objective: TeacherObjective
    coef: Annotated[float, Range("a negative weight drives the policy away", 0)]
    reward_coef: Annotated[float, Range("a negative weight makes good responses bad", 0)]
    beta: Annotated[float, BETWEEN_0_AND_1]
    top_k: Annotated[int | None, at_least_one("null takes all tokens")]
    top_of: TopOf
    given_fraction: Annotated[float, share("0 means only sampled responses")]
    temperature: SharedTemperature
    log_prob_chunk_tokens: Annotated[int, at_least_one("logits are computed chunk by chunk"), FREE]

    @property
    def paths(self) -> dict[str, str]:
        """Paths of the teachers by name; the only one may have none."""
        if isinstance(self.models, Mapping):
            return {str(name): str(path) for name, path in self.models.items()}
        return {"": self.models} if isinstance(self.models, str) else {}

    @property
    def divergence_chunk_tokens(self) -> int:
        """Tokens whose distributions of policy and teacher exist at one time."""
        return min(self.log_prob_chunk_tokens, DIVERGENCE_TOKENS)

    @property
    def is_sampled(self) -> bool:
        """True if only the sampled tokens' log-probs count, not the whole distributions."""
        return self.objective is TeacherObjective.sampled


@dataclass(kw_only=True)
class RolloutConfig(RoleConfig):
    """conf/rollout. max_num_seqs and max_in_flight may be null before `derive`."""

    model: SharedModel
    lora: SharedLoRA
    seed: Annotated[int, SEED]
    tensor_parallel_size: Annotated[int, at_least_one("1 means no tensor parallelism"), FREE]
    expert_parallel: Annotated[bool, FREE]
    responses_per_prompt: Annotated[int, at_least_one("a prompt needs a response")]
    schedule: Schedule
    max_in_flight: Annotated[int | None, at_least_one("a step trains on some prompts")]
    exact: Annotated[bool, FREE]
    keep_kv: bool
    router_replay: RouterReplay
    max_versions: Annotated[int, at_least_zero("0 means only tokens of the present weights")]
    temperature: Annotated[float, above_zero("eval.greedy=true evaluates greedily")]
    top_p: Annotated[float, share("it is a share of probability; 1 means all", low_open=True)]
    max_prompt_tokens: Annotated[int, at_least_one("a prompt has tokens")]
    max_response_tokens: Annotated[int, at_least_one("a response has tokens")]
    dtype: DType
    weights: RolloutWeights
    gpu_memory_utilization: Annotated[float, BETWEEN_0_AND_1, FREE]
    kv_cache_mb: Annotated[int | None, at_least_one("vLLM needs a KV cache"), FREE]
    max_num_seqs: Annotated[int | None, at_least_one("vLLM decodes at least one sequence"), FREE]
    num_scheduler_steps: Annotated[int, at_least_one("a submission decodes a token"), FREE]
    enforce_eager: Annotated[bool, FREE]
    sleep: Annotated[SleepMode, FREE, CHOSEN]
    reshard_bucket_mb: Annotated[int, at_least_one("weights are moved in buckets"), FREE]
    verify_reshard: Annotated[bool, FREE]


@dataclass(kw_only=True)
class SaverConfig(RoleConfig):
    """Config of the role that writes checkpoints; built in code, not a section.

    Attributes:
        prepares: true allocates host memory at the start, which takes some time on GPUs.
    """

    prepares: bool


@dataclass(kw_only=True)
class SenderConfig(RoleConfig):
    """Config of the role that sends weights to other ranks; built in code, not a section."""

    rollout: RolloutConfig


@dataclass(kw_only=True)
class RunConfig(Section):
    """Config of one run, resolved: no interpolations, no nulls that mean "derive it".

    Only fsdp.columns stays null until the rollout engine is traced. A role's section is an instance
    of its worker's `config_class`, possibly a user's subclass. Absent sections are None.
    """

    seed: Annotated[int, SEED]
    resume: Annotated[str, FREE]
    run: Annotated[RunSection, FREE]
    hardware: Annotated[HardwareConfig, FREE]
    model: ModelConfig
    data: DataConfig
    fsdp: FSDPConfig
    cluster: Annotated[ClusterConfig, FREE]
    placement: Annotated[PlacementConfig, FREE]
    algorithm: AlgorithmConfig
    lora: LoRAConfig | None
    actor: ActorConfig
    critic: CriticConfig
    ref: ReferenceConfig
    rollout: RolloutConfig
    reward: RewardConfig
    reward_model: RewardModelConfig | None
    teacher: TeacherConfig | None
    trainer: TrainerConfig
    eval: Annotated[EvalConfig, FREE]
    environment: EnvironmentConfig | None
    agent: AgentConfig | None
    tracking: Annotated[TrackingConfig, FREE]
    health: Annotated[HealthConfig, FREE]
    checkpoint: Annotated[CheckpointConfig, FREE]
    doctor: Annotated[DoctorConfig, FREE]

    @property
    def eval_top_p(self) -> float:
        """top_p of evaluations: eval.top_p, or that of training."""
        return self.rollout.top_p if self.eval.top_p is None else self.eval.top_p

    @property
    def earns_rewards(self) -> bool:
        """True if an environment or a program gives the rewards, in place of reward.function."""
        return self.environment is not None or self.agent is not None
