"""Thresholds of the health checks (trainer/health/checks.py), by their ids; null: off."""

from dataclasses import dataclass

from hybridrl.config.annotations import Section


@dataclass(kw_only=True)
class HealthConfig(Section):
    """conf/health."""

    unknown_tokens: float | None
    duplicate_prompts: float | None
    overlap: float | None
    no_generation_marker: float | None
    constant_reward: float | None
    unmixed_groups: float | None
    wrong_form: float | None
    hacked_reward: float | None
    failed_rewards: float | None
    failed_eval_rewards: float | None
    slow_reward: float | None
    truncated: float | None
    no_end_token: float | None
    empty_responses: float | None
    special_tokens: float | None
    repeated_responses: float | None
    collapsed_entropy: float | None
    exploded_entropy: float | None
    exploded_kl: float | None
    exploded_ratio: float | None
    clipped_ratio: float | None
    still_policy: float | None
    frozen_actor: float | None
    clipped_actor_gradient: float | None
    clipped_critic_gradient: float | None
    no_actor_lr: float | None
    no_critic_lr: float | None
    skipped_actor_updates: float | None
    skipped_critic_updates: float | None
    blind_critic: float | None
    mismatch: float | None
    stale_policy: float | None
    missing_adapters: float | None
    slow_engine: float | None
