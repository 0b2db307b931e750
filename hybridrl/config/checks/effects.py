"""Rejects user-set keys that have no effect with the other settings."""

from collections.abc import Iterator
from typing import NamedTuple

from hybridrl.config.choices import (
    Accelerator,
    CorrectionMethod,
    Init,
    Layout,
    LRSchedule,
)
from hybridrl.config.command.provenance import Provenance, Source
from hybridrl.config.data_schema import SOURCE_KEYS, DataConfig
from hybridrl.config.estimators import SETTINGS, estimator_of, taking, uses_critic
from hybridrl.config.planner.shard_order import is_nested
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.schema import RunConfig


class Idle(NamedTuple):
    """Keys without effect, and the setting that causes it.

    Attributes:
        keys: leaves or sections.
        cause: the key of that setting.
        text: the cause and its value.
        remedy: change that gives the keys an effect.
    """

    keys: tuple[str, ...]
    cause: str
    text: str
    remedy: str


def effect_problems(config: RunConfig, provenance: Provenance) -> Iterator[str]:
    """Find user-set keys without effect.

    Keys of a recipe are allowed if the command line is the cause: so a user can switch off a part
    of a recipe.
    """
    for idle in _idle(config):
        for key in sorted({found for prefix in idle.keys for found in provenance.under(prefix)}):
            source = provenance.source(key)
            if source >= Source.recipe and source >= provenance.source(idle.cause):
                yield (
                    f"{key} is set but has no effect with {idle.text}.\n"
                    f"Remove {key}, or {idle.remedy}."
                )


def _idle(config: RunConfig) -> Iterator[Idle]:
    kl = config.algorithm.kl
    if kl.coef == 0:
        others = ("placement", "estimator", "target", "horizon")
        yield Idle(
            ("ref", *(f"algorithm.kl.{name}" for name in others)),
            "algorithm.kl.coef",
            "algorithm.kl.coef = 0, which disables the reference",
            "set algorithm.kl.coef above 0",
        )
    elif kl.target is None:
        yield Idle(
            ("algorithm.kl.horizon",),
            "algorithm.kl.target",
            "algorithm.kl.target = null",
            "set algorithm.kl.target",
        )
    yield from _idle_estimator(config)
    optims = {"actor": config.actor.optim}
    if estimator_of(config.algorithm.advantage).uses_critic:
        optims["critic"] = config.critic.optim
    for role, optim in optims.items():
        if optim.schedule is LRSchedule.constant:
            yield Idle(
                (f"{role}.optim.min_lr_ratio",),
                f"{role}.optim.schedule",
                f"{role}.optim.schedule = constant",
                f"set {role}.optim.schedule=cosine or linear",
            )
    yield from _idle_loss(config)
    yield from _idle_lora(config)
    yield from _idle_rollout(config)
    yield from _idle_layout(config)
    if config.model.init is Init.pretrained and not uses_critic(config):
        yield Idle(
            ("model.seed",),
            "model.init",
            "model.init = pretrained and no critic",
            "set model.init=random",
        )
    yield from _idle_data(config.data)
    if config.environment is not None:
        yield Idle(
            ("reward.function", "reward.args"),
            "environment",
            f"environment.function = {config.environment.function}, which gives the rewards",
            "set environment=none",
        )


def _idle_estimator(config: RunConfig) -> Iterator[Idle]:
    """Yield keys that the advantage estimator does not use."""
    advantage = config.algorithm.advantage
    estimator = estimator_of(advantage)
    cause, text = "algorithm.advantage", f"algorithm.advantage = {advantage}"
    for name in SETTINGS:
        if name not in estimator.takes:
            others = " or ".join(taking(name))
            yield Idle((f"algorithm.{name}",), cause, text, f"set algorithm.advantage={others}")
    if estimator.whitens:
        yield Idle(
            ("algorithm.whiten_advantages",),
            cause,
            f"{text}, which always whitens",
            "set another algorithm.advantage",
        )
    if not estimator.uses_critic:
        yield Idle(
            ("critic", "trainer.critic_warmup_steps"),
            cause,
            f"{text}, which needs no critic",
            "set algorithm=ppo",
        )


def _idle_loss(config: RunConfig) -> Iterator[Idle]:
    """Yield unused keys of the rollout correction and the overlong penalty."""
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if policy_loss_of(config.algorithm.loss.function).is_against_rollout:
        yield Idle(
            (key,),
            "algorithm.loss.function",
            f"algorithm.loss.function = {config.algorithm.loss.function}, which uses the "
            f"sampling probabilities itself",
            "set another algorithm/loss",
        )
    elif correction.method is CorrectionMethod.none:
        keys = (f"{key}.level", f"{key}.low", f"{key}.high")
        yield Idle(keys, f"{key}.method", f"{key}.method = none", f"set {key}.method=truncate")
    elif correction.method is CorrectionMethod.truncate:
        text = f"{key}.method = truncate"
        yield Idle((f"{key}.low",), f"{key}.method", text, f"set {key}.method=mask")
    if config.algorithm.overlong.buffer_tokens == 0:
        yield Idle(
            ("algorithm.overlong.penalty",),
            "algorithm.overlong.buffer_tokens",
            "algorithm.overlong.buffer_tokens = 0",
            "set algorithm.overlong.buffer_tokens",
        )


def _idle_lora(config: RunConfig) -> Iterator[Idle]:
    """Yield keys of a separate reference, which a run with adapters does not have."""
    if config.lora is not None:
        yield Idle(
            ("ref.log_prob_chunk_tokens",),
            "lora.rank",
            f"lora.rank = {config.lora.rank}: the reference is the actor's model without adapters",
            "set actor.log_prob_chunk_tokens",
        )


def _idle_data(data: DataConfig) -> Iterator[Idle]:
    """Yield unused keys of conf/data."""
    if data.mixture:
        yield Idle(
            tuple(f"data.{key}" for key in SOURCE_KEYS),
            "data.mixture",
            "data.mixture, whose data sets set these themselves",
            "set data.mixture.<name>.*",
        )
    elif data.train_files is not None:
        yield Idle(
            ("data.name",),
            "data.train_files",
            "data.train_files set",
            "remove data.train_files",
        )
    if data.few_shot == 0:
        solutions = (f"data.mixture.{name}.solution_key" for name in data.mixture)
        yield Idle(
            ("data.solution_key", *solutions),
            "data.few_shot",
            "data.few_shot = 0",
            "set data.few_shot above 0",
        )
    if data.curriculum is None:
        yield Idle(
            ("data.curriculum_steps",),
            "data.curriculum",
            "data.curriculum = null",
            "set data.curriculum=<column with the difficulty>",
        )


def _idle_layout(config: RunConfig) -> Iterator[Idle]:
    """Yield unused keys of a layout without shards inside tensor-parallel slices."""
    tp, dp_shard = config.rollout.tensor_parallel_size, config.fsdp.dp_shard
    if dp_shard is None:  # reported elsewhere
        return
    if config.fsdp.layout is Layout.plain and tp > 1:
        yield Idle(
            ("fsdp.columns",), "fsdp.layout", "fsdp.layout = plain", "set fsdp.layout=aligned"
        )
    elif not is_nested(config.fsdp):
        yield Idle(
            ("fsdp.layout", "fsdp.columns"),
            "rollout.tensor_parallel_size",
            f"rollout.tensor_parallel_size = {tp}",
            f"set it to a divisor above 1 of fsdp.dp_shard = {dp_shard}",
        )


def _idle_rollout(config: RunConfig) -> Iterator[Idle]:
    """Yield keys that vLLM ignores on CPUs, and a replaced number of slots."""
    if config.hardware.accelerator is Accelerator.cpu:
        yield Idle(
            ("rollout.gpu_memory_utilization",),
            "hardware",
            "hardware = cpu",
            "set rollout.kv_cache_mb",
        )
        yield Idle(
            ("rollout.sleep",),
            "hardware",
            "hardware = cpu, where vLLM cannot free memory",
            "set hardware=gpu",
        )
    if config.placement.slots_on_nodes is not None:
        yield Idle(
            ("cluster.gpus_per_node",),
            "placement.slots_on_nodes",
            f"placement.slots_on_nodes = {config.placement.slots_on_nodes}",
            "set placement.slots_on_nodes=null",
        )
