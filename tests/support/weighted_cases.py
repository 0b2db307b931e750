"""Rewards with parts; test_weighted.py runs them, here and in reward processes."""

import math
from typing import Any

from hybridrl.rewards.base import Score


def length(prompt: str, response: str, example: dict[str, Any], scale: float = 1.0) -> float:
    return scale * len(response)


def vowels(prompt: str, response: str, example: dict[str, Any]) -> Score:
    counts = {letter: float(response.count(letter)) for letter in "ae"}
    return Score(sum(counts.values()), counts)


def num_ids(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def fails_on_x(prompt: str, response: str, example: dict[str, Any]) -> float:
    if response == "x":
        raise ValueError("no x, please")
    return 1.0


def some_parts(prompt: str, response: str, example: dict[str, Any]) -> Score:
    """Parts as the response names them."""
    return Score(1.0, dict.fromkeys(response.split(), 2.0))


def bad_part(prompt: str, response: str, example: dict[str, Any]) -> Any:
    bad = {"nan": math.nan, "text": "1", "name": 1.0}[response]
    return Score(1.0, {"two words" if response == "name" else "part": bad})
