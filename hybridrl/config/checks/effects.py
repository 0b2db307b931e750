"""Rejects user-set keys that have no effect with the other settings."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from operator import attrgetter
from typing import Any, NamedTuple

from hybridrl.config.annotations import Unusable
from hybridrl.config.choices import Init, Layout
from hybridrl.config.command.provenance import Provenance, Source
from hybridrl.config.command.report import shown
from hybridrl.config.data_schema import SOURCE_KEYS
from hybridrl.config.estimators import SETTINGS, Estimator, estimator_of, taking, uses_critic
from hybridrl.config.planner.world import is_nested
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.schema import RunConfig


class Idle(NamedTuple):
    """Keys without effect, and the setting that causes it.

    Attributes:
        keys: leaves or sections, separated by spaces, with * for any name.
        cause: the key of that setting.
        when: its value, or a function that returns whether the keys have no effect.
        remedy: change that gives the keys an effect.
        why: follows the cause and its value in the message.
    """

    keys: str
    cause: str
    when: Any
    remedy: str
    why: str = ""

    def applies(self, config: RunConfig) -> bool:
        """Return whether the keys have no effect."""
        if callable(self.when):
            return bool(self.when(config))
        return bool(attrgetter(self.cause)(config) == self.when)


def _estimator(config: RunConfig) -> Estimator:
    return estimator_of(config.algorithm.advantage)


def _is_plain(config: RunConfig) -> bool:
    """Return whether shards could be aligned to slices, and are not."""
    return config.fsdp.layout is Layout.plain and config.rollout.tensor_parallel_size > 1


def _lacks(setting: str) -> Callable[[RunConfig], bool]:
    return lambda config: setting not in _estimator(config).takes


_KL, _CORRECTION = "algorithm.kl", "algorithm.rollout_correction"
_ADVANTAGE, _DEVICE = "algorithm.advantage", "hardware.accelerator"
# A key is reported by the first rule that applies to it.
RULES = (
    Idle(
        f"ref {_KL}.placement {_KL}.estimator {_KL}.target {_KL}.horizon",
        f"{_KL}.coef",
        0,
        f"set {_KL}.coef above 0",
        ", which disables the reference",
    ),
    Idle(f"{_KL}.horizon", f"{_KL}.target", None, f"set {_KL}.target"),
    *(
        Idle(
            f"algorithm.{name}",
            _ADVANTAGE,
            _lacks(name),
            f"set {_ADVANTAGE}={' or '.join(taking(name))}",
        )
        for name in SETTINGS
    ),
    Idle(
        "algorithm.whiten_advantages",
        _ADVANTAGE,
        lambda config: _estimator(config).whitens,
        f"set another {_ADVANTAGE}",
        ", which always whitens",
    ),
    Idle(
        "critic trainer.critic_warmup_steps",
        _ADVANTAGE,
        lambda config: not uses_critic(config),
        "set algorithm=ppo",
        ", which needs no critic",
    ),
    *(
        Idle(
            f"{role}.optim.min_lr_ratio",
            f"{role}.optim.schedule",
            "constant",
            f"set {role}.optim.schedule=cosine or linear",
        )
        for role in ("actor", "critic")
    ),
    Idle(
        _CORRECTION,
        "algorithm.loss.function",
        lambda config: policy_loss_of(config.algorithm.loss.function).is_against_rollout,
        "set another algorithm/loss",
        ", which uses the sampling probabilities itself",
    ),
    Idle(
        f"{_CORRECTION}.level {_CORRECTION}.low {_CORRECTION}.high",
        f"{_CORRECTION}.method",
        "none",
        f"set {_CORRECTION}.method=truncate",
    ),
    Idle(
        f"{_CORRECTION}.low", f"{_CORRECTION}.method", "truncate", f"set {_CORRECTION}.method=mask"
    ),
    Idle("algorithm.overlong.penalty", "algorithm.overlong.buffer_tokens", 0, "set it above 0"),
    Idle(
        "ref.log_prob_chunk_tokens",
        "lora.rank",
        lambda config: config.lora is not None,
        "set actor.log_prob_chunk_tokens",
        ": the reference is the actor's model without adapters",
    ),
    Idle("rollout.gpu_memory_utilization", _DEVICE, "cpu", "set rollout.kv_cache_mb"),
    Idle("rollout.sleep", _DEVICE, "cpu", "set hardware=gpu", ", where vLLM cannot free memory"),
    Idle(
        "cluster.gpus_per_node",
        "placement.slots_on_nodes",
        lambda config: config.placement.slots_on_nodes is not None,
        "set placement.slots_on_nodes=null",
    ),
    Idle("fsdp.columns", "fsdp.layout", _is_plain, "set fsdp.layout=aligned"),
    Idle(
        "fsdp.layout fsdp.columns",
        "rollout.tensor_parallel_size",
        lambda config: not is_nested(config.fsdp) and not _is_plain(config),
        "set it to a divisor above 1 of fsdp.dp_shard",
    ),
    Idle(
        "model.seed",
        "model.init",
        lambda config: config.model.init is Init.pretrained and not uses_critic(config),
        "set model.init=random",
        " and no critic",
    ),
    Idle(
        " ".join(f"data.{key}" for key in SOURCE_KEYS),
        "data.mixture",
        lambda config: config.data.mixture,
        "set data.mixture.<name>.*",
        ", whose data sets set these themselves",
    ),
    Idle("data.name", "data.train_files", lambda config: config.data.train_files, "remove it"),
    Idle("data.solution_key data.mixture.*.solution_key", "data.few_shot", 0, "set it above 0"),
    Idle(
        "data.curriculum_steps", "data.curriculum", None, "set it to a column with the difficulty"
    ),
    Idle(
        "reward.function reward.args",
        "environment.function",
        lambda config: config.environment is not None,
        "set environment=none",
        ", which gives the rewards",
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
            if not rule.applies(config):
                continue
            for key in sorted(provenance.sources.keys() - reported):
                source = provenance.source(key)
                caused = source >= Source.recipe and source >= provenance.source(rule.cause)
                if caused and any(
                    fnmatch(key, k) or fnmatch(key, f"{k}.*") for k in rule.keys.split()
                ):
                    reported.add(key)
                    yield (
                        f"{key} is set but has no effect with {_setting(config, rule.cause)}"
                        f"{rule.why}.\nRemove {key}, or {rule.remedy}."
                    )


def _setting(config: RunConfig, key: str) -> str:
    """Return "key = value"; of a mapping only the key."""
    value = attrgetter(key)(config)
    return key if isinstance(value, Mapping) else f"{key} = {shown(value)}"
