"""Trackers, and thresholds of the health checks (health/checks.yaml)."""

from dataclasses import dataclass
from typing import Annotated

from hybridrl.config.annotations import ANY, Section, at_least_zero

Limit = Annotated[float | None, at_least_zero("a check compares a share, count or distance")]


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
    mismatch: Limit
    stale_policy: Limit
    missing_adapters: Limit
    slow_engine: Limit
