"""Scorers of rewards, by the settings that a test needs, and what becomes of processes."""

import time
from collections.abc import Callable
from typing import Any

import psutil

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


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Wait until it holds; whether it does."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    """There is no such process, or a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
