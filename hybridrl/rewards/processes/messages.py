"""Messages between a pool and its processes, over a socket that user code can write to as well.

The pool sends pickles: a Setup, as item START, then lists of items. The process sends lines of
JSON, which is never executed; anything else that it sends is detected as an error:

    [START, is_async]                   when it has imported the function
    [index, value]                      for each item; in order, unless the function is async
    [index, kind, reason, traceback]    instead, if the item failed
"""

import fcntl
import io
import json
import os
import pickle
import resource
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any

from hybridrl.config.user_code.tracebacks import printable, printable_lines

# An item and its index in the batch; from the process, its value or Failure.
Indexed = tuple[int, Any]
# Index of the setup; its value is whether the function is async.
START = -1

# Variable with the path for temporary files of a process: who needs a folder there makes it, and it
# goes with the process.
FOLDER = "HYBRIDRL_PROCESS_FOLDER"
# Seconds after its time limit in which an async item may end what it has started.
END_S = 2.0
MAX_MESSAGE_BYTES = 256 * 2**20
# User code that closes or writes descriptors by number uses low numbers.
_HIGH_DESCRIPTOR = 2**15


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


# Beginning of a note of an error, which tells what the user's code wrote.
OUTPUT = "output: "


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


class ChildEnd:
    """Process's end of the connection, moved to a high descriptor out of the way of user code."""

    def __init__(self, fd: int) -> None:
        self._process = os.getpid()
        lowest = min(_HIGH_DESCRIPTOR, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(fd)
        self._file = io.FileIO(moved, "r+")
        self._buffered = io.BufferedReader(self._file)

    def receive(self) -> Any:
        """Return the next message; raise EOFError if the parent has closed its end."""
        return pickle.load(self._buffered)

    def send(self, message: Indexed | Failure) -> None:
        """Send a message; end the process if it is a fork made by user code."""
        if os.getpid() != self._process:
            os._exit(0)
        fields = message if isinstance(message, tuple) else astuple(message)
        rest = memoryview(json.dumps(fields).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]


def visible(text: str) -> str:
    r"""Escape lone surrogates (\ud800), which files and tokenizers cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def parsed(line: bytes | bytearray) -> Indexed:
    """Parse a line from a process; raise a ValueError or RecursionError if it is no message."""
    match json.loads(line):
        case [int() as index, value]:
            return index, value
        case [int() as index, "error" | "timeout" as kind, str() as reason, str() as trace]:
            return index, Failure(
                index, FailureKind(kind), printable(reason), printable_lines(trace)
            )
    raise ValueError("JSON, but no message")
