"""Variants of a run, and the keys that they do not have: these cannot be set.

conf/ has the keys of all variants, as the command line may choose another one. A key that the user
sets must belong to the chosen one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from typing import Any, NamedTuple

from hybridrl.config.annotations import Unusable, value_at
from hybridrl.config.choices import IN_PARTS, ON_OWN_RANKS, Aggregation, Init, Layout, Targets
from hybridrl.config.command.provenance import Provenance, Source
from hybridrl.config.errors import ABSENT, Problem, shown
from hybridrl.config.estimators import (
    SETTINGS,
    estimator_of,
    is_supervised,
    taking,
    trains_on_answers,
    trains_reward_model,
    uses_critic,
)
from hybridrl.config.planner.world import is_nested
from hybridrl.config.policy_losses import policy_loss_of, targets_of, uses_reference
from hybridrl.config.schema import TENSOR_PARALLEL, RunConfig
from hybridrl.config.sections import SOURCE_KEYS
from hybridrl.config.user_code.classes import awaits_rewards


class Variant(NamedTuple):
    """A variant, and the keys that it does not have.

    Attributes:
        key: the discriminator, whose value chooses the variant.
        value: of the key in this variant, or a function that tells whether a run has it.
        lacks: leaves or sections, separated by spaces, with * for any name.
        why: follows the key and its value in the message.
        remedy: change to a variant with these keys; by default of the key.
    """

    key: str
    value: Any
    lacks: str
    why: str = ""
    remedy: str = ""

    def is_chosen(self, config: RunConfig) -> bool:
        """Return whether a run has this variant."""
        if callable(self.value):
            return bool(self.value(config))
        return bool(value_at(config, self.key) == self.value)


def _is_set(key: str) -> Callable[[RunConfig], bool]:
    return lambda config: bool(value_at(config, key))


def _lacks(setting: str) -> Callable[[RunConfig], bool]:
    return lambda config: setting not in estimator_of(config.algorithm.advantage).takes


def _of_teacher(key: str, values: tuple[Any, ...]) -> Callable[[RunConfig], bool]:
    return lambda config: config.teacher is not None and vars(config.teacher)[key] in values


def _is_plain(config: RunConfig) -> bool:
    """Return whether shards could be aligned to slices, and are not."""
    return config.fsdp.layout is Layout.plain and config.rollout.tensor_parallel_size > 1


def _trains_on_others(config: RunConfig, targets: Collection[Targets]) -> bool:
    return not (is_supervised(config) and targets_of(config) in targets)


def _warms_up_before_training(config: RunConfig) -> bool:
    steps = config.actor.optim.warmup_steps
    return uses_critic(config) and 0 < steps <= config.trainer.critic_warmup_steps


_ADVANTAGE, _CORRECTION = "algorithm.advantage", "algorithm.rollout_correction"
_JUDGED = "reward.function reward.args reward.signature reward.concurrency"
_OF_SAMPLES = (
    f"algorithm.whiten_advantages {_CORRECTION} algorithm.overlong algorithm.max_sampling_rounds "
    "trainer.max_log_prob_diff tracking.token_samples rollout.schedule rollout.router_replay "
    "rollout.exact "
    "reward_model teacher"
)
# A key is reported for the first variant that does not have it.
VARIANTS = (
    Variant(
        _ADVANTAGE,
        is_supervised,
        _OF_SAMPLES,
        ": supervised fine-tuning samples no responses to train on",
        "set algorithm=grpo",
    ),
    Variant(
        "algorithm.loss.function",
        trains_reward_model,
        "actor.optim actor.entropy_coef actor.router_balance_coef lora critic.value_clip "
        "critic.worker trainer.critic_warmup_steps",
        ": a reward model is trained in the critic's place, and the policy is not",
        "set critic.optim, or algorithm=dpo",
    ),
    Variant("algorithm.kl.coef", 0, "algorithm.kl"),
    Variant(
        "algorithm.kl.coef",
        lambda c: not uses_reference(c),
        "ref",
        ", which disables the reference",
    ),
    *(
        Variant(f"teacher.{key}", _of_teacher(key, values), keys)
        for key, values, keys in (
            ("objective", ("sampled",), "teacher.top_k teacher.top_of teacher.given_fraction"),
            ("objective", ("sampled", "reverse_kl", "forward_kl"), "teacher.beta"),
            ("top_k", (None,), "teacher.top_of"),
        )
    ),
    Variant("algorithm.kl.target", None, "algorithm.kl.horizon"),
    Variant("trainer.epochs", _is_set("trainer.epochs"), "trainer.total_steps", ", which sets it"),
    *(
        Variant(
            _ADVANTAGE,
            _lacks(name),
            f"algorithm.{name}",
            remedy=f"set {_ADVANTAGE}={' or '.join(taking(name))}",
        )
        for name in SETTINGS
    ),
    Variant(
        _ADVANTAGE,
        lambda c: estimator_of(c.algorithm.advantage).whitens,
        "algorithm.whiten_advantages",
        ", which always whitens",
    ),
    *(
        Variant(_ADVANTAGE, test, keys, ", which needs no critic", "set algorithm=ppo")
        for test, keys in (
            (lambda c: not uses_critic(c), "critic"),
            # 0 is what scripts of other trainers set.
            (
                lambda c: c.trainer.critic_warmup_steps > 0 and not uses_critic(c),
                "trainer.critic_warmup_steps",
            ),
        )
    ),
    Variant(
        "trainer.critic_warmup_steps",
        _warms_up_before_training,
        "actor.optim.warmup_steps",
        ", steps in which the actor is not trained",
        "raise it above trainer.critic_warmup_steps",
    ),
    *(
        Variant(
            f"{role}.optim.schedule", "constant", f"{role}.optim.min_lr_ratio {role}.total_steps"
        )
        for role in ("actor", "critic")
    ),
    Variant(
        "algorithm.aggregation",
        lambda c: c.algorithm.aggregation is not Aggregation.sequence_sum,
        "actor.max_response_tokens",
        remedy="set algorithm.aggregation=sequence_sum",
    ),
    Variant(
        "algorithm.loss.function",
        lambda c: policy_loss_of(c.algorithm.loss.function).is_against_rollout,
        _CORRECTION,
        ", which uses the sampling probabilities itself",
    ),
    Variant("rollout.exact", True, _CORRECTION, ": vLLM and the trainer do not differ"),
    Variant(f"{_CORRECTION}.method", "none", _CORRECTION),
    Variant(
        f"{_CORRECTION}.method",
        "truncate",
        f"{_CORRECTION}.low",
        remedy=f"set {_CORRECTION}.method=mask",
    ),
    Variant("algorithm.overlong.buffer_tokens", 0, "algorithm.overlong.penalty"),
    Variant(
        "rollout.schedule",
        lambda c: c.rollout.schedule not in IN_PARTS,
        "rollout.max_in_flight rollout.max_versions rollout.keep_kv",
        remedy="set rollout.schedule=partial or split",
    ),
    Variant(
        "rollout.schedule",
        lambda c: c.rollout.schedule in ON_OWN_RANKS,
        "rollout.sleep",
        ", whose engines never sleep",
    ),
    Variant("rollout.max_versions", 0, "rollout.keep_kv", ", which leaves no response unfinished"),
    Variant(
        "lora.rank",
        _is_set("lora"),
        "ref.log_prob_chunk_tokens",
        ": the reference is the actor's model without adapters",
        "set actor.log_prob_chunk_tokens",
    ),
    Variant(
        "hardware.accelerator",
        "cpu",
        "rollout.gpu_memory_utilization",
        remedy="set rollout.kv_cache_mb",
    ),
    Variant("hardware.accelerator", "cpu", "rollout.sleep", ", where vLLM cannot free memory"),
    Variant(
        "placement.slots_on_nodes", _is_set("placement.slots_on_nodes"), "cluster.gpus_per_node"
    ),
    Variant(TENSOR_PARALLEL, 1, "rollout.expert_parallel", ": it holds all experts"),
    Variant("fsdp.layout", _is_plain, "fsdp.columns"),
    Variant(
        TENSOR_PARALLEL,
        lambda c: not is_nested(c.fsdp) and not _is_plain(c),
        "fsdp.layout fsdp.columns",
        remedy="set it to a divisor above 1 of fsdp.dp_shard",
    ),
    Variant(
        "model.init",
        lambda c: c.model.init is Init.pretrained and not uses_critic(c),
        "model.seed",
        " and no critic",
        "set model.init=random",
    ),
    Variant(
        "data.mixture",
        _is_set("data.mixture"),
        " ".join(f"data.{key}" for key in SOURCE_KEYS),
        ", whose data sets set these themselves",
    ),
    Variant("data.train_files", _is_set("data.train_files"), "data.name"),
    Variant("data.function", _is_set("data.function"), "data.name"),
    Variant("data.function", None, "data.args"),
    Variant(
        "data.few_shot",
        lambda c: c.data.few_shot == 0 and not trains_on_answers(c),
        "data.solution_key data.mixture.*.solution_key",
    ),
    *(
        Variant(
            "algorithm.loss.function",
            partial(_trains_on_others, targets=targets),
            keys,
            remedy=f"set algorithm={algorithm}",
        )
        for targets, keys, algorithm in (
            ([Targets.pairs, Targets.labels], "data.chosen_key", "dpo"),
            ([Targets.pairs], "data.rejected_key", "dpo"),
            ([Targets.labels], "data.label_key", "kto"),
        )
    ),
    Variant("data.curriculum", None, "data.curriculum_steps"),
    *(
        Variant(
            f"{section}.function",
            _is_set(section),
            keys,
            ", which gives the rewards",
            "set environment=none",
        )
        for section, keys in (
            ("environment", _JUDGED),
            ("agent", f"{_JUDGED} reward.timeout_s reward.num_processes"),
        )
    ),
    Variant(
        "reward.function",
        lambda c: not awaits_rewards(c),
        "reward.concurrency",
        ", which is not async: each process computes one response at a time",
        "make it async def, or set reward.num_processes",
    ),
)


def variant_problems(config: RunConfig, provenance: Provenance) -> Iterator[Problem]:
    """Find user-set keys that the run's variant does not have.

    Keys of a recipe are allowed if the command line chooses the variant: so a user can switch off
    a part of a recipe.
    """
    reported: set[str] = set()
    for variant in VARIANTS:
        with suppress(Unusable):
            keys = [
                key
                for key in sorted(provenance.keys() - reported)
                if _lacks_set(variant, key, provenance)
            ]
            if not keys or not variant.is_chosen(config):
                continue
            reported.update(keys)
            chosen = value_at(config, variant.key)
            shows = "" if isinstance(chosen, Mapping) else f" = {shown(chosen)}"
            why = f"no effect with {variant.key}{shows}{variant.why}"
            for key in keys:
                remedy = f"Remove {key}, or {variant.remedy or f'change {variant.key}'}"
                yield Problem("no_effect", key, ABSENT, "", why, remedy)


def _lacks_set(variant: Variant, key: str, provenance: Provenance) -> bool:
    """Return whether a variant lacks a key that the user set no less directly than its choice."""
    source = provenance.source(key)
    return (
        source >= Source.recipe
        and source >= provenance.source(variant.key)
        and not f"{variant.key}.".startswith(f"{key}.")
        and any(fnmatch(f"{key}.", f"{lacked}.*") for lacked in variant.lacks.split())
    )
