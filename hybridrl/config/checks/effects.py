"""Rejects user-set keys that have no effect with the other settings."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any, NamedTuple

from hybridrl.config.annotations import Unusable
from hybridrl.config.choices import Aggregation, Init, Layout
from hybridrl.config.command.provenance import Provenance, Source
from hybridrl.config.command.report import shown
from hybridrl.config.estimators import SETTINGS, estimator_of, is_supervised, taking, uses_critic
from hybridrl.config.planner.world import is_nested
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.schema import RunConfig
from hybridrl.config.sections.data import SOURCE_KEYS
from hybridrl.config.user_code.classes import awaits_rewards


class Idle(NamedTuple):
    """Keys without effect, and the setting that causes it.

    Attributes:
        keys: leaves or sections, separated by spaces, with * for any name; the cause is none.
        cause: the key of that setting.
        when: its value, or a function that returns whether the keys have no effect.
        why: follows the cause and its value in the message.
        remedy: change that gives the keys an effect; by default of the cause.
    """

    keys: str
    cause: str
    when: Any
    why: str = ""
    remedy: str = ""

    def applies(self, config: RunConfig) -> bool:
        """Return whether the keys have no effect."""
        if callable(self.when):
            return bool(self.when(config))
        return bool(attrgetter(self.cause)(config) == self.when)


def _is_plain(config: RunConfig) -> bool:
    """Return whether shards could be aligned to slices, and are not."""
    return config.fsdp.layout is Layout.plain and config.rollout.tensor_parallel_size > 1


def _lacks(setting: str) -> Callable[[RunConfig], bool]:
    return lambda config: setting not in estimator_of(config.algorithm.advantage).takes


_CORRECTION, _ADVANTAGE = "algorithm.rollout_correction", "algorithm.advantage"
# A key is reported by the first rule that applies to it.
RULES = (
    Idle(
        "algorithm.whiten_advantages algorithm.rollout_correction algorithm.overlong "
        "algorithm.max_sampling_rounds trainer.max_log_prob_diff tracking.token_samples "
        "rollout.schedule rollout.router_replay reward_model",
        _ADVANTAGE,
        is_supervised,
        ": supervised fine-tuning samples no responses to train on",
        "set algorithm=grpo",
    ),
    Idle("ref algorithm.kl", "algorithm.kl.coef", 0, ", which disables the reference"),
    Idle("algorithm.kl.horizon", "algorithm.kl.target", None),
    Idle(
        "trainer.total_steps",
        "trainer.epochs",
        lambda config: config.trainer.epochs is not None,
        ", which sets it",
        "set trainer.epochs=null",
    ),
    *(
        Idle(
            f"algorithm.{name}",
            _ADVANTAGE,
            _lacks(name),
            remedy=f"set {_ADVANTAGE}={' or '.join(taking(name))}",
        )
        for name in SETTINGS
    ),
    Idle(
        "algorithm.whiten_advantages",
        _ADVANTAGE,
        lambda config: estimator_of(config.algorithm.advantage).whitens,
        ", which always whitens",
    ),
    *(
        Idle(keys, _ADVANTAGE, when, ", which needs no critic", "set algorithm=ppo")
        for keys, when in (
            ("critic", lambda config: not uses_critic(config)),
            # 0 is what scripts of other trainers set.
            (
                "trainer.critic_warmup_steps",
                lambda config: config.trainer.critic_warmup_steps and not uses_critic(config),
            ),
        )
    ),
    Idle(
        "actor.optim.warmup_steps",
        "trainer.critic_warmup_steps",
        lambda config: (
            uses_critic(config)
            and 0 < config.actor.optim.warmup_steps <= config.trainer.critic_warmup_steps
        ),
        ", steps in which the actor is not trained",
        "raise it above trainer.critic_warmup_steps",
    ),
    Idle("actor.optim.min_lr_ratio actor.total_steps", "actor.optim.schedule", "constant"),
    Idle("critic.optim.min_lr_ratio critic.total_steps", "critic.optim.schedule", "constant"),
    Idle(
        "actor.max_response_tokens",
        "algorithm.aggregation",
        lambda config: config.algorithm.aggregation is not Aggregation.sequence_sum,
        remedy="set algorithm.aggregation=sequence_sum",
    ),
    Idle(
        _CORRECTION,
        "algorithm.loss.function",
        lambda config: policy_loss_of(config.algorithm.loss.function).is_against_rollout,
        ", which uses the sampling probabilities itself",
    ),
    Idle(_CORRECTION, f"{_CORRECTION}.method", "none"),
    Idle(
        f"{_CORRECTION}.low",
        f"{_CORRECTION}.method",
        "truncate",
        remedy=f"set {_CORRECTION}.method=mask",
    ),
    Idle("algorithm.overlong.penalty", "algorithm.overlong.buffer_tokens", 0),
    Idle(
        "rollout.max_in_flight rollout.max_versions rollout.keep_kv",
        "rollout.schedule",
        "sync",
        remedy="set rollout.schedule=partial or split",
    ),
    Idle("rollout.keep_kv", "rollout.max_versions", 0, ", which leaves no response unfinished"),
    Idle("rollout.sleep", "rollout.schedule", "split", ", whose engines never sleep"),
    Idle(
        "ref.log_prob_chunk_tokens",
        "lora.rank",
        lambda config: config.lora is not None,
        ": the reference is the actor's model without adapters",
        "set actor.log_prob_chunk_tokens",
    ),
    Idle(
        "rollout.gpu_memory_utilization",
        "hardware.accelerator",
        "cpu",
        remedy="set rollout.kv_cache_mb",
    ),
    Idle("rollout.sleep", "hardware.accelerator", "cpu", ", where vLLM cannot free memory"),
    Idle(
        "cluster.gpus_per_node",
        "placement.slots_on_nodes",
        lambda config: config.placement.slots_on_nodes is not None,
    ),
    Idle("rollout.expert_parallel", "rollout.tensor_parallel_size", 1, ": it holds all experts"),
    Idle("fsdp.columns", "fsdp.layout", _is_plain),
    Idle(
        "fsdp.layout fsdp.columns",
        "rollout.tensor_parallel_size",
        lambda config: not is_nested(config.fsdp) and not _is_plain(config),
        remedy="set it to a divisor above 1 of fsdp.dp_shard",
    ),
    Idle(
        "model.seed",
        "model.init",
        lambda config: config.model.init is Init.pretrained and not uses_critic(config),
        " and no critic",
        "set model.init=random",
    ),
    Idle(
        " ".join(f"data.{key}" for key in SOURCE_KEYS),
        "data.mixture",
        lambda config: config.data.mixture,
        ", whose data sets set these themselves",
    ),
    Idle("data.name", "data.train_files", lambda config: config.data.train_files),
    Idle(
        "data.solution_key data.mixture.*.solution_key",
        "data.few_shot",
        lambda config: config.data.few_shot == 0 and not is_supervised(config),
    ),
    Idle("data.curriculum_steps", "data.curriculum", None),
    Idle(
        "reward.function reward.args reward.signature reward.concurrency",
        "environment.function",
        lambda config: config.environment is not None,
        ", which gives the rewards",
        "set environment=none",
    ),
    Idle(
        "reward.function reward.args reward.signature reward.concurrency reward.timeout_s "
        "reward.num_processes",
        "agent.function",
        lambda config: config.agent is not None,
        ", which gives the rewards",
        "set environment=none",
    ),
    Idle(
        "reward.concurrency",
        "reward.function",
        lambda config: not awaits_rewards(config),
        ", which is not async: each process computes one response at a time",
        "make it async def, or set reward.num_processes",
    ),
)


def effect_problems(config: RunConfig, provenance: Provenance) -> Iterator[str]:
    """Find user-set keys without effect.

    Keys of a recipe are allowed if the command line is the cause: so a user can switch off a part
    of a recipe.
    """
    reported: set[str] = set()
    for rule in RULES:
        with suppress(Unusable):
            keys = [
                key for key in sorted(provenance.keys() - reported) if _sets(rule, key, provenance)
            ]
            if not keys or not rule.applies(config):
                continue
            reported.update(keys)
            for key in keys:
                yield (
                    f"{key} is set but has no effect with {_setting(config, rule.cause)}"
                    f"{rule.why}.\nRemove {key}, or {rule.remedy or f'change {rule.cause}'}."
                )


def _sets(rule: Idle, key: str, provenance: Provenance) -> bool:
    """Return whether the user set a key of the rule, and not less directly than its cause."""
    source = provenance.source(key)
    return (
        source >= Source.recipe
        and source >= provenance.source(rule.cause)
        and not f"{rule.cause}.".startswith(f"{key}.")
        and any(fnmatch(f"{key}.", f"{idle}.*") for idle in rule.keys.split())
    )


def _setting(config: RunConfig, key: str) -> str:
    """Return "key = value"; of a mapping only the key."""
    value = attrgetter(key)(config)
    return key if isinstance(value, Mapping) else f"{key} = {shown(value)}"
