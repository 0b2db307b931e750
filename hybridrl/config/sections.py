"""Sections that are no role, but for those of the machine (schema.py)."""

from dataclasses import dataclass
from typing import Annotated, Any

from hybridrl.config.annotations import (
    ANY,
    FREE,
    LARGEST_COUNT,
    LONGEST_S,
    Range,
    Section,
    above_zero,
    at_least_one,
    at_least_zero,
    seconds,
    share,
)
from hybridrl.config.choices import (
    Aggregation,
    CorrectionLevel,
    CorrectionMethod,
    KLEstimator,
    KLPlacement,
    OtherSampling,
    Repeated,
    RewardSignature,
    TooLongPrompts,
)

# The adaptive KL coefficient's controller clips its relative error to this (Ziegler et al. 2019,
# section 2.2): a step changes the coefficient by at most this share of responses over horizon.
MAX_RELATIVE_KL_ERROR = 0.2
# Keys of conf/data that a mixture replaces by keys per data set.
SOURCE_KEYS = ("name", "train_files", "eval_files")
# A threshold of a health check.
Limit = Annotated[float | None, at_least_zero("a check compares a share, count or distance")]


@dataclass(kw_only=True)
class KLConfig(Section):
    """conf/algorithm: kl."""

    placement: KLPlacement
    estimator: KLEstimator
    coef: Annotated[float, Range("a negative penalty drives the policy away; 0 disables it", 0)]
    target: Annotated[float | None, above_zero("the controller divides by it")]
    horizon: Annotated[int, at_least_one("the controller divides by it")]


@dataclass(kw_only=True)
class FunctionConfig(Section):
    """A function, built-in or the user's, and its settings."""

    function: str
    args: dict[str, Any]


@dataclass(kw_only=True)
class RolloutCorrectionConfig(Section):
    """conf/algorithm: rollout_correction."""

    method: CorrectionMethod
    level: CorrectionLevel
    low: Annotated[float, Range("it is a bound of ratios; 0 means none", 0)]
    high: Annotated[float, above_zero("it is a bound of ratios")]


@dataclass(kw_only=True)
class OverlongConfig(Section):
    """conf/algorithm: overlong."""

    buffer_tokens: Annotated[int, at_least_zero("it counts tokens; 0 means no penalty")]
    penalty: Annotated[float, above_zero("it is subtracted from the reward")]
    train_on_truncated: bool


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """conf/algorithm."""

    advantage: str
    gamma: Annotated[float, share("it is a discount per token", low_open=True)]
    lam: Annotated[float, share("1 is Monte Carlo, 0 is one-step TD")]
    pass_k: Annotated[int, at_least_one("a set needs a response")]
    whiten_advantages: bool
    loss: FunctionConfig
    aggregation: Aggregation
    rollout_correction: RolloutCorrectionConfig
    overlong: OverlongConfig
    max_sampling_rounds: Annotated[int, at_least_one("1 means that no prompt is sampled again")]
    kl: KLConfig


@dataclass(kw_only=True)
class MixturePart(Section):
    """conf/data: one data set of the mixture; null means the value of conf/data.

    Attributes:
        weight: share of the prompts, relative to the other data sets.
        name, train_files: source of the problems; exactly one is set.
    """

    weight: Annotated[float, Range("it is a share of prompts", 0, LARGEST_COUNT, low_open=True)]
    name: str | None
    train_files: Any
    eval_files: Any
    prompt_key: str | None
    answer_key: str | None
    images_key: str | None
    solution_key: str | None
    num_eval_problems: Annotated[
        int | None, at_least_one("null means data.num_eval_problems"), FREE
    ]
    system_prompt: str | None


@dataclass(kw_only=True)
class DataConfig(Section):
    """conf/data. Files are a path or a list of paths."""

    name: str
    train_files: Any
    eval_files: Any
    function: str | None
    args: dict[str, Any]
    prompt_key: str
    answer_key: str | None
    images_key: str | None
    num_eval_problems: Annotated[int | None, at_least_one("null evaluates all problems"), FREE]
    system_prompt: str | None
    chat_template_kwargs: dict[str, Any]
    few_shot: Annotated[int, at_least_zero("it counts examples; 0 means none")]
    solution_key: str | None
    chosen_key: str
    rejected_key: str
    label_key: str
    too_long_prompts: TooLongPrompts
    duplicates: Repeated
    held_out_overlap: Repeated
    curriculum: str | None
    curriculum_steps: Annotated[int, at_least_one("it is the length of the curriculum")]
    prompts_per_step: Annotated[int, at_least_one("a step needs prompts")]
    mixture: dict[str, MixturePart]

    @property
    def lacks_answers(self) -> bool:
        """Return whether rows of a data set have no answer."""
        parts = self.mixture.values()
        return self.answer_key is None and not (parts and all(part.answer_key for part in parts))


@dataclass(kw_only=True)
class RewardConfig(FunctionConfig):
    """conf/reward."""

    signature: RewardSignature
    concurrency: Annotated[int, Range("async rewards need one at a time", 1, 65536), FREE]
    timeout_s: Annotated[float, seconds("a reward needs time; the longest wait is 3 weeks"), FREE]
    num_processes: Annotated[int | None, Range("each takes tens of megabytes", 1, 4096), FREE]
    failed_score: Annotated[float, Range("NaN or infinity would spoil the whole batch")]


@dataclass(kw_only=True)
class EnvironmentConfig(FunctionConfig):
    """conf/environment: answers between the model's turns."""

    max_turns: Annotated[int, at_least_one("a conversation needs a turn")]
    stop: list[str]
    role: str


@dataclass(kw_only=True)
class AgentConfig(FunctionConfig):
    """Programs that sample through the endpoint."""

    concurrency: Annotated[int | None, Range("episodes run at the same time", 1, 65536), FREE]
    num_processes: Annotated[int | None, Range("each takes tens of megabytes", 1, 4096), FREE]
    timeout_s: Annotated[float, seconds("an episode needs time; the longest wait is 3 weeks"), FREE]
    memory_mb: Annotated[int, at_least_one("a program needs memory"), FREE]
    other_sampling: OtherSampling
    tool_parser: str | None
    host: Annotated[str, FREE]
    port: Annotated[int, Range("0 takes a free one", 0, 65535), FREE]


@dataclass(kw_only=True)
class TrainerConfig(Section):
    """conf/trainer. With epochs, total_steps counts once the data is read (validate.py).

    max_log_prob_diff may be null before `derive`.
    """

    total_steps: Annotated[int, at_least_one("a run needs a step"), FREE]
    epochs: Annotated[float | None, above_zero("it counts passes over the prompts"), FREE]
    critic_warmup_steps: Annotated[int, at_least_zero("0 means no warm-up")]
    max_log_prob_diff: Annotated[
        float | None, above_zero("it limits a mean of absolute values"), FREE
    ]
    samples_every_steps: Annotated[int, at_least_zero("0 means never"), FREE]
    save_final_model: Annotated[bool, FREE]
    max_skipped_steps: Annotated[int, at_least_one("1 ends the run at the first one"), FREE]
    max_restarts: Annotated[int, at_least_zero("0 means no restart"), FREE]
    profile_steps: Annotated[list[int], at_least_one("steps are counted from 1"), FREE]
    callbacks: Annotated[list[str], FREE]


@dataclass(kw_only=True)
class EvalConfig(Section):
    """conf/eval."""

    before_training: bool
    every_steps: Annotated[int, at_least_zero("0 means only before and after training")]
    greedy: bool
    top_k: Annotated[int | None, at_least_one("null samples from all tokens")]
    top_p: Annotated[float | None, share("null is rollout.top_p; 1 means all", low_open=True)]
    samples: Annotated[int, at_least_one("each problem has a response")]
    rules: dict[str, FunctionConfig]


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """conf/checkpoint. on_sigterm is in seconds."""

    every_steps: Annotated[int, at_least_zero("0 means never")]
    keep_last: Annotated[int, at_least_zero("it counts checkpoints; 0 keeps all")]
    keep_best: str | None
    on_sigterm: Annotated[float, Range("it is a time; 0 ends the run at once", 0, LONGEST_S)]
    allow_config_changes: bool


@dataclass(kw_only=True)
class TrackingConfig(Section):
    """conf/tracking."""

    token_samples: Annotated[int, at_least_zero("0 writes no tokens")]
    report: bool
    tensorboard: bool
    wandb_project: str | None
    mlflow_uri: str | None


@dataclass(kw_only=True)
class HealthConfig(Section):
    """conf/health: thresholds by check; null turns it off."""

    unknown_tokens: Limit
    duplicate_prompts: Limit
    overlap: Limit
    no_generation_marker: Limit
    constant_reward: Limit
    unmixed_groups: Limit
    wrong_form: Limit
    fallen_accuracy: Limit
    failed_rewards: Limit
    failed_eval_rewards: Limit
    slow_reward: Limit
    truncated: Limit
    unended_responses: Limit
    empty_responses: Limit
    special_tokens: Limit
    repeated_responses: Limit
    collapsed_entropy: Limit
    exploded_entropy: Limit
    exploded_kl: Limit
    exploded_ratio: Limit
    clipped_ratio: Limit
    still_policy: Limit
    frozen_actor: Limit
    clipped_gradient: Limit
    no_learning_rate: Limit
    skipped_updates: Limit
    blind_critic: Annotated[float | None, ANY]
    teacher_template: Limit
    contrary_teacher: Annotated[float | None, ANY]
    growing_teacher_kl: Limit
    mismatch: Limit
    stale_policy: Limit
    missing_adapters: Limit
    slow_engine: Limit
