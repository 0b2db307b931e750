"""Role configs for tests: float32 on CPU, everything as plain as can be."""

from pathlib import Path
from typing import Any

from hybridrl.config.choices import (
    Accumulation,
    Aggregation,
    CorrectionLevel,
    CorrectionMethod,
    DType,
    Init,
    KLEstimator,
    KLPlacement,
    Layout,
    LRSchedule,
    Offload,
    RolloutWeights,
    RouterReplay,
    Schedule,
    SleepMode,
    TeacherObjective,
    TeacherTokenizer,
    TopOf,
)
from hybridrl.config.schema import (
    ActorConfig,
    CriticConfig,
    FSDPConfig,
    LoRAConfig,
    ModelConfig,
    ModelPathConfig,
    OptimConfig,
    ReferenceConfig,
    RewardModelConfig,
    RolloutConfig,
    SaverConfig,
    TeacherConfig,
)
from hybridrl.config.sections import (
    AlgorithmConfig,
    FunctionConfig,
    KLConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
)

LINEAR_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)


def model_config(
    folder: Path | str, init: Init = Init.pretrained, seed: int = 0, *, trusted: bool = False
) -> ModelConfig:
    return ModelConfig(path=str(folder), init=init, seed=seed, trust_remote_code=trusted)


def fsdp_config(dp_shard: int, dp_replicate: int = 1, **changes: Any) -> FSDPConfig:
    values: dict[str, Any] = {
        "reshard_after_forward": True,
        "param_dtype": DType.float32,
        "reduce_dtype": DType.float32,
        "activation_checkpointing": False,
        "accumulation": Accumulation.full,
        "layout": Layout.aligned,
        "tensor_parallel_size": 1,
        "columns": None,
        "ulysses_size": 1,
        "offload": Offload.none,
        "compile": False,
        "share_prefixes": False,
        "exact": False,
    }
    return FSDPConfig(dp_shard=dp_shard, dp_replicate=dp_replicate, **(values | changes))


def optim_config(lr: float = 1e-3) -> OptimConfig:
    return OptimConfig(
        lr=lr,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        schedule=LRSchedule.constant,
        warmup_steps=0,
        min_lr_ratio=0.0,
    )


def lora_config(rank: int = 0, **changes: Any) -> LoRAConfig | None:
    if rank == 0:
        return None
    values: dict[str, Any] = {
        "alpha": 8.0,
        "target_modules": list(LINEAR_LAYERS),
        "seed": 4,
    }
    return LoRAConfig(rank=rank, **(values | changes))


def algorithm_config() -> AlgorithmConfig:
    """PPO with a KL penalty in the loss."""
    return AlgorithmConfig(
        advantage="gae",
        gamma=1.0,
        lam=1.0,
        pass_k=4,
        whiten_advantages=True,
        loss=FunctionConfig(function="ppo_clip", args={"clip_low": 0.2, "clip_high": 0.2}),
        aggregation=Aggregation.token_mean,
        rollout_correction=RolloutCorrectionConfig(
            method=CorrectionMethod.none, level=CorrectionLevel.token, low=0.5, high=2.0
        ),
        overlong=OverlongConfig(buffer_tokens=0, penalty=1.0, train_on_truncated=True),
        max_sampling_rounds=1,
        kl=KLConfig(
            placement=KLPlacement.loss,
            estimator=KLEstimator.k3,
            coef=0.1,
            target=None,
            horizon=1000,
        ),
    )


def actor_config(folder: Path, fsdp: FSDPConfig, **changes: Any) -> ActorConfig:
    values: dict[str, Any] = {
        "worker": "hybridrl.workers.actor.ActorWorker",
        "model": model_config(folder),
        "fsdp": fsdp,
        "algorithm": algorithm_config(),
        "lora": lora_config(),
        "total_steps": 10,
        "temperature": 0.8,
        "mini_batch_size": 8,
        "epochs": 1,
        "max_tokens_per_gpu": 64,
        "max_response_tokens": 16,
        "entropy_coef": 0.01,
        "router_replay": RouterReplay.none,
        "router_balance_coef": 0.0,
        "log_prob_chunk_tokens": 7,
        "train_vision": False,
        "optim": optim_config(),
    }
    return ActorConfig(**(values | changes))


def critic_config(folder: Path, fsdp: FSDPConfig, **changes: Any) -> CriticConfig:
    values: dict[str, Any] = {
        "worker": "hybridrl.workers.critic.CriticWorker",
        "model": model_config(folder, seed=3),
        "fsdp": fsdp,
        "total_steps": 10,
        "value_clip": 0.2,
        "optim": optim_config(),
    }
    return CriticConfig(**(values | changes))


def rollout_config(folder: Path, **changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "worker": "hybridrl.workers.rollout.RolloutWorker",
        "model": model_config(folder),
        "lora": None,
        "seed": 5,
        "tensor_parallel_size": 1,
        "expert_parallel": False,
        "responses_per_prompt": 2,
        "schedule": Schedule.sync,
        "exact": False,
        "router_replay": RouterReplay.none,
        "max_in_flight": 3,
        "max_versions": 0,
        "keep_kv": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_prompt_tokens": 100,
        "max_response_tokens": 28,
        "dtype": DType.bfloat16,
        "weights": RolloutWeights.dtype,
        "gpu_memory_utilization": 0.1,
        "kv_cache_mb": 16,
        "max_num_seqs": 16,
        "num_scheduler_steps": 1,
        "enforce_eager": False,
        "sleep": SleepMode.all,
        "reshard_bucket_mb": 1,
        "verify_reshard": True,
    }
    return RolloutConfig(**(values | changes))


def saver_config() -> SaverConfig:
    return SaverConfig(worker="hybridrl.workers.saver.SaverWorker", prepares=True)


def reference_config(folder: Path, fsdp: FSDPConfig, **changes: Any) -> ReferenceConfig:
    values: dict[str, Any] = {
        "worker": "hybridrl.workers.reference.ReferenceWorker",
        "model": model_config(folder),
        "fsdp": fsdp,
        "lora": lora_config(),
        "temperature": 0.8,
        "log_prob_chunk_tokens": 7,
    }
    return ReferenceConfig(**(values | changes))


def reward_model_config(folder: Path, fsdp: FSDPConfig) -> RewardModelConfig:
    return RewardModelConfig(
        worker="hybridrl.workers.reward_model.RewardModelWorker",
        model=ModelPathConfig(path=str(folder)),
        fsdp=fsdp,
        weight=1.0,
    )


def teacher_config(models: Any, fsdp: FSDPConfig, **changes: Any) -> TeacherConfig:
    values: dict[str, Any] = {
        "worker": "hybridrl.workers.teacher.TeacherWorker",
        "models": models,
        "fsdp": fsdp,
        "init": Init.pretrained,
        "seed": 1,
        "tokenizer": TeacherTokenizer.student,
        "objective": TeacherObjective.sampled,
        "coef": 1.0,
        "reward_coef": 0.0,
        "beta": 0.5,
        "top_k": None,
        "top_of": TopOf.student,
        "given_fraction": 0.0,
        "temperature": 0.8,
        "log_prob_chunk_tokens": 7,
    }
    return TeacherConfig(**(values | changes))
