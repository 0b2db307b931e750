"""A process that runs user code below a supervisor, and its connection with this one.

It is a new Python interpreter: not forked, since this process has threads, nor spawned by
multiprocessing, which would import the main module and torch. The connection is a socket that user
code can write to as well. So pickles travel to the process only; it sends lines of JSON, which is
never executed.
"""

import fcntl
import importlib
import io
import json
import logging
import os
import pickle
import re
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from hybridrl.processes.messages import END_S, START, Indexed, Setup, parsed
from hybridrl.processes.supervisor import end, remove, supervise
from hybridrl.processes.texts import printable

_logger = logging.getLogger(__name__)

# Variable with the path for temporary files of a process: who needs a folder there makes it, and it
# goes with the process.
FOLDER = "HYBRIDRL_PROCESS_FOLDER"
# Entry of a pool's processes.
SERVE = "hybridrl.processes.child.serve"
START_TIMEOUT_S = 120.0
# Seconds after the time limit, and END_S if it is async, at which a process that did not interrupt
# its item is killed.
KILL_AFTER_S = 1.0
MAX_MESSAGE_BYTES = 256 * 2**20
_READ_BYTES = 2**16
# User code that closes or writes descriptors by number uses low numbers.
_HIGH_DESCRIPTOR = 2**15
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.processes.process import main; main(*map(int, sys.argv[2:4]), sys.argv[4])"
)
# Short words need another word before them: PWD is a folder, and COMPASS is not secret.
_SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY|CONNECTION_?STRING|PGPASS)$|SECRET"
    r"|_(PASS|PWD|PAT|AUTH|CREDS)$",
    re.I,
)


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable holds a secret, by its name."""
    return _SECRET.search(name) is not None


def environment_for(args: Any) -> dict[str, str]:
    """Return this process's environment; secret variables only if a text of `args` names them."""
    texts = json.dumps(args, default=str)
    return {
        name: value
        for name, value in os.environ.items()
        if not is_secret_variable(name) or json.dumps(name) in texts
    }


class UserProcess:
    """Process that calls an entry with its `ChildEnd`, and ends when that returns.

    It starts in the background, and ends with the thread that started it.

    Args:
        entry: dotted path of a function of hybridrl.
        environment: of the process.
        is_silent: its output is dropped, instead of being that of this process.

    Attributes:
        socket: readable when a message has arrived or the process has ended.
    """

    def __init__(
        self, entry: str, environment: Mapping[str, str], *, is_silent: bool = False
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self._line = bytearray()  # of which the end has not arrived
        self._folder = f"{tempfile.gettempdir()}/hybridrl_{secrets.token_hex(8)}"
        output = subprocess.DEVNULL if is_silent else None
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), entry]
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, FOLDER: self._folder},
                pass_fds=[theirs.fileno()],
                process_group=0,  # out of reach of the terminal's Ctrl-C
            )

    def send(self, message: object, timeout_s: float) -> None:
        """Send what can be pickled; raise an OSError if the process has ended or reads nothing."""
        self.socket.settimeout(timeout_s)
        self.socket.sendall(pickle.dumps(message))

    def messages(self) -> Iterator[Any]:
        """Yield the messages that have arrived, without waiting for the end of the last one.

        Raises:
            EOFError, OSError: the process has ended.
            ValueError, RecursionError: it sent something else than a message.
        """
        self.socket.setblocking(False)
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise EOFError
            first, *others = data.split(b"\n")
            self._line += first
            if len(self._line) > MAX_MESSAGE_BYTES:
                raise ValueError("a message without end")
            for other in others:
                yield json.loads(self._line)
                self._line = bytearray(other)

    def ask_to_end(self) -> None:
        """Send SIGTERM; `end` waits for the end."""
        self._supervisor.terminate()

    def end(self) -> int:
        """End the process and those it started; return its supervisor's exit code.

        What cannot be removed of the process's folder is logged.
        """
        exit_code = end(self._supervisor)
        self.socket.close()  # after the end: the process may still be writing
        if reason := remove(self._folder):
            _logger.warning("%s cannot be removed: %s", self._folder, printable(reason))
        return exit_code


class PoolProcess(UserProcess):
    """Process of a pool.

    Attributes:
        deadline: time.monotonic() of the next result at the latest.
        pending: index -> item without a result; at the start, the setup. The first is the current
            one, unless the function is async.
        is_async: True if all pending items are under way; known after the start.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(SERVE, environment_for(setup.args))
        self._timeout_s = setup.timeout_s
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.pending: dict[int, Any] = {START: setup}
        self.is_async = False
        with suppress(OSError):  # already ended: reported when waiting for it to be ready
            self.send(setup, START_TIMEOUT_S)

    def hand_out(self, items: list[Indexed]) -> None:
        """Assign items to a process without pending ones, or to an async one.

        Raises:
            OSError: it has ended or sent unexpected data; `pending` is as before.
        """
        if not self.pending and wait([self.socket], 0):
            raise ConnectionError("the process has ended or sent unexpected data")
        self.send(items, self._answer_timeout_s)
        self.pending.update(items)
        self.deadline = time.monotonic() + self._answer_timeout_s

    def receive(self) -> Iterator[Indexed]:
        """Yield the values and failures that have arrived; raise as `messages` does."""
        for index, result in map(parsed, self.messages()):
            if index not in self.pending or (
                not self.is_async and index != next(iter(self.pending))
            ):
                raise ValueError("a result without a pending item")
            self.is_async = self.is_async or (index == START and result is True)
            yield index, result
            del self.pending[index]
            self.deadline = time.monotonic() + self._answer_timeout_s

    @property
    def _answer_timeout_s(self) -> float:
        """Seconds in which it must answer."""
        return self._timeout_s + KILL_AFTER_S + (END_S if self.is_async else 0.0)


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

    def send(self, message: object) -> None:
        """Send a message as JSON; end the process if it is a fork made by user code."""
        if os.getpid() != self._process:
            os._exit(0)
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]


def main(fd: int, parent: int, entry: str) -> None:
    """Call the entry with the connection `fd`, below a supervisor, a child of this parent."""
    supervise(parent, fd=fd, folder=os.environ[FOLDER])
    module, _, name = entry.rpartition(".")
    with suppress(EOFError):
        vars(importlib.import_module(module))[name](ChildEnd(fd))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)  # despite threads that user code has started
