"""Rewards: functions (prompt, response, example, **args) -> float, run outside the trainer."""
