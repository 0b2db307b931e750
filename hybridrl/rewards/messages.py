"""Messages between a pool and its processes."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """Failure of an item: it raised or killed its process, or exceeded the time limit."""

    error = "error"
    timeout = "timeout"


@dataclass(frozen=True, slots=True)
class Setup:
    """To the process, once: the function to compute.

    Attributes:
        task: dotted path of a factory, (function, args) -> (item -> value).
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
    """From the process, once: the function is imported, or the problem."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """To the process: items with their indices in the batch."""

    items: list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class ItemResult:
    """From the process, one for each item of a chunk, in order: a value or a failure.

    Attributes:
        index: of the item in the batch.
        value: in types of JSON; None for a failure.
        kind: of the failure; None for a value.
        reason: of the failure, one line.
        traceback: of the failure.
    """

    index: int
    value: Any
    kind: FailureKind | None = None
    reason: str = ""
    traceback: str = ""
