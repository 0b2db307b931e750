"""Scorers of rewards, by the settings that a test needs."""

from typing import Any

from hybridrl.config.choices import RewardSignature
from hybridrl.config.schema import RewardConfig
from hybridrl.rewards.scorer import RewardScorer


def reward_scorer(
    function: str,
    args: dict[str, Any],
    *,
    timeout_s: float,
    num_processes: int,
    failed_score: float,
    concurrency: int = 1,
    signature: RewardSignature = RewardSignature.auto,
) -> RewardScorer:
    """Start the processes of a reward."""
    config = RewardConfig(
        function=function,
        args=args,
        signature=signature,
        concurrency=concurrency,
        timeout_s=timeout_s,
        num_processes=num_processes,
        failed_score=failed_score,
    )
    return RewardScorer(config)
