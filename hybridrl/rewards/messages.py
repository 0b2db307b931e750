"""What the scorer and its processes say to each other."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hybridrl.rewards.base import RewardItem


class FailureKind(StrEnum):
    """Why an item has no score of its own: it raised or killed its process, or took too long."""

    error = "error"
    timeout = "timeout"


@dataclass(frozen=True, slots=True)
class Setup:
    """To the process, once: the reward's dotted path, its args and seconds per item."""

    function: str
    args: dict[str, Any]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """From the process, once: the function is there, or why it is not."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """To the process: items, each with its index in the batch."""

    items: list[tuple[int, RewardItem]]


@dataclass(frozen=True, slots=True)
class Answer:
    """From the process, one for each item of a chunk, in order.

    `kind` is None for a score; else `score` is NaN, `parts` is empty, and `reason` (one line) and
    `traceback` tell.
    """

    index: int
    score: float
    parts: dict[str, float]
    kind: FailureKind | None = None
    reason: str = ""
    traceback: str = ""
