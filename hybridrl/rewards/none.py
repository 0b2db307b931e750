"""Zero reward, for training with a reward model alone (conf/reward_model)."""

from typing import Any


def score(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 0.0 for every response."""
    return 0.0
