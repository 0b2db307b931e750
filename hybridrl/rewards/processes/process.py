"""Handle of one reward process: start, assign work, receive results, kill.

The process is a new Python interpreter: it is not forked, since this process has threads, nor
spawned by multiprocessing, which would import the main module and torch.
"""

import json
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from hybridrl.config.command.secrets import is_secret_variable
from hybridrl.config.user_code.supervisor import end, remove
from hybridrl.config.user_code.tracebacks import printable
from hybridrl.rewards.processes.messages import (
    END_S,
    FOLDER,
    MAX_MESSAGE_BYTES,
    START,
    Indexed,
    Setup,
    parsed,
)

_logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
# Seconds after the time limit, and END_S if it is async, at which a process that did not interrupt
# its item is killed.
KILL_AFTER_S = 1.0
_READ_BYTES = 2**16

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.rewards.processes.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardProcessError(RuntimeError):
    """Failed start of a pool's processes, not caused by an item."""


class RewardProcess:
    """Process that computes rewards or steps environments, under a supervisor process.

    It starts in the background.

    Attributes:
        socket: readable when a result has arrived or the process has ended.
        deadline: time.monotonic() of the next result at the latest.
        pending: index -> item without a result; at the start, the setup. The first is the current
            one, unless the function is async.
        is_async: True if all pending items are under way; known after the start.
    """

    def __init__(self, setup: Setup) -> None:
        self._timeout_s = setup.timeout_s
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._line = bytearray()  # of which the end has not arrived
        self._folder = f"{tempfile.gettempdir()}/hybridrl_{secrets.token_hex(8)}"
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(fd), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=environment_for(setup.args) | {FOLDER: self._folder},
                pass_fds=[fd],
                process_group=0,  # out of reach of the terminal's Ctrl-C
            )
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.pending: dict[int, Any] = {START: setup}
        self.is_async = False
        with suppress(OSError):  # already ended: reported when waiting for it to be ready
            self._send(setup, START_TIMEOUT_S)

    def hand_out(self, items: list[Indexed]) -> None:
        """Assign items to a process without pending ones, or to an async one.

        Raises:
            OSError: it has ended or sent unexpected data; `pending` is as before.
        """
        self._send(items, self._answer_timeout_s)
        self.pending.update(items)
        self.deadline = time.monotonic() + self._answer_timeout_s

    def receive(self) -> Iterator[Indexed]:
        """Yield the values and failures that have arrived.

        Raises:
            EOFError, OSError: the process has ended.
            ValueError, RecursionError: it sent an invalid message.
        """
        for index, found in self._messages():
            if index not in self.pending or (not self.is_async and index != self.first):
                raise ValueError("a result without a pending item")
            self.is_async = self.is_async or (index == START and found is True)
            yield index, found
            del self.pending[index]
            self.deadline = time.monotonic() + self._answer_timeout_s

    @property
    def _answer_timeout_s(self) -> float:
        """Seconds in which it must answer."""
        return self._timeout_s + KILL_AFTER_S + (END_S if self.is_async else 0.0)

    @property
    def first(self) -> int:
        """Index of the item that has been pending for longest."""
        return next(iter(self.pending))

    def _send(self, message: Setup | list[Indexed], timeout_s: float) -> None:
        if not self.pending and wait([self.socket], 0):
            raise ConnectionError("the process has ended or sent unexpected data")
        content = pickle.dumps(message)
        self.socket.settimeout(timeout_s)
        self.socket.sendall(content)
        self.socket.setblocking(False)

    def _messages(self) -> Iterator[Indexed]:
        """Yield the messages that have arrived, without waiting for the end of the last one."""
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
                yield parsed(self._line)
                self._line = bytearray(other)

    def ask_to_end(self) -> None:
        """Send SIGTERM; `kill` waits for the end."""
        self._process.terminate()

    def kill(self) -> int:
        """End the process and those it started; return its supervisor's exit code.

        What it cannot remove of the process's folder is logged.
        """
        exit_code = end(self._process)
        self.socket.close()  # after the end: the process may still be writing
        if reason := remove(self._folder):
            _logger.warning("%s cannot be removed: %s", self._folder, printable(reason))
        return exit_code


def environment_for(args: Any) -> dict[str, str]:
    """Return this process's environment; secret variables only if a text of `args` names them."""
    texts = json.dumps(args, default=str)
    return {
        name: value
        for name, value in os.environ.items()
        if not is_secret_variable(name) or json.dumps(name) in texts
    }
