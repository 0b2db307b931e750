"""What a pool and its processes say to each other."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """Why an item has no value of its own: it raised or killed its process, or took too long."""

    error = "error"
    timeout = "timeout"


@dataclass(frozen=True, slots=True)
class Setup:
    """To the process, once: what it computes.

    Attributes:
        task: dotted path of (function, args) -> (item -> value), which makes what answers items.
        function: dotted path of the user's function or class.
        args: its keyword arguments.
        timeout_s: seconds per item.
    """

    task: str
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

    items: list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """From the process, one for each item of a chunk, in order.

    `kind` is None for a value, made of what JSON knows; else `value` is None, and `reason` (one
    line) and `traceback` tell.
    """

    index: int
    value: Any
    kind: FailureKind | None = None
    reason: str = ""
    traceback: str = ""
