"""No reward: what is learned then comes from a reward model alone (conf/reward_model)."""

from typing import Any


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    """0.0 for every response.

    Args:
        prompt: not looked at.
        response: not looked at.
        example: not looked at.
    """
    return 0.0
