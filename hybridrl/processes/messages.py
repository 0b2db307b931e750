"""Messages between a pool and its processes.

The pool sends a Setup, as item START, then lists of items. The process answers:

    [START, is_async]                   when it has imported the function
    [index, value]                      for each item; in order, unless the function is async
    [index, kind, reason, traceback]    instead, if the item failed
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hybridrl.processes.texts import printable, printable_lines

# An item and its index in the batch; from the process, its value or Failure.
Indexed = tuple[int, Any]
# Index of the setup; its value is whether the function is async.
START = -1
# Seconds after its time limit that the failure of an async item waits for what its code cleans up.
END_S = 2.0
# Beginning of a note of an error, which tells what the user's code wrote.
OUTPUT = "output: "


class FailureKind(StrEnum):
    """Failure of an item: it raised or killed its process, or exceeded the time limit."""

    error = "error"
    timeout = "timeout"


@dataclass(frozen=True, slots=True)
class Setup:
    """To the process, once: the function to compute.

    Attributes:
        task: dotted path of a factory, (function, args, **options) -> (item -> value, in types of
            JSON), which may be async.
        function: dotted path of the user's function or class.
        args: its keyword arguments.
        timeout_s: seconds per item.
        concurrency: items under way over all processes of the pool if the task is async.
        options: of the factory.
    """

    task: str
    function: str
    args: dict[str, Any]
    timeout_s: float
    concurrency: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Item that failed.

    Attributes:
        index: of the item in the batch.
        kind: error (exception, not a finite number, process died) or timeout.
        reason: one printable line.
        traceback: of the exception, in printable lines that are indented; empty if the process was
            killed or died.
    """

    index: int
    kind: FailureKind
    reason: str
    traceback: str = ""


def visible(text: str) -> str:
    r"""Escape lone surrogates (\ud800), which files and tokenizers cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def parsed(message: Any) -> Indexed:
    """Return the value or failure that a process has sent; raise a ValueError if it is neither."""
    match message:
        case [int() as index, value]:
            return index, value
        case [int() as index, "error" | "timeout" as kind, str() as reason, str() as trace]:
            return index, Failure(
                index, FailureKind(kind), printable(reason), printable_lines(trace)
            )
    raise ValueError("JSON, but no message")
