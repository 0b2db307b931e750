"""Handle of one reward process: start, assign work, receive results, kill.

The process is a new Python interpreter: it is not forked, since this process has threads, nor
spawned by multiprocessing, which would import the main module and torch.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hybridrl.config.command.secrets import is_secret_variable
from hybridrl.config.user_code.supervisor import end
from hybridrl.rewards.messages import Chunk, ItemResult, Ready, Setup
from hybridrl.rewards.wire import ParentEnd, ProtocolError

START_TIMEOUT_S = 120.0
# Seconds after the time limit at which a process that did not interrupt its item is killed.
KILL_AFTER_S = 1.0

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.rewards.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardProcessError(RuntimeError):
    """Failed start of a pool's processes, not caused by an item."""


class RewardProcess:
    """Process that computes rewards or steps environments, under a supervisor process.

    It starts in the background.

    Args:
        setup: function to compute.
        what: its name in errors ("reward").

    Attributes:
        link: readable when a result has arrived or the process has ended.
        deadline: time.monotonic() of the next result at the latest.
        is_ready: true once it has started.
        pending: items without a result, the current one first.
    """

    def __init__(self, setup: Setup, what: str) -> None:
        self._what = what
        self._answer_timeout_s = setup.timeout_s + KILL_AFTER_S
        ours, theirs = socket.socketpair()
        self.link = ParentEnd(ours)
        self._process = _start(theirs, environment_for(setup.args))
        theirs.close()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.is_ready = False
        self.pending: deque[tuple[int, Any]] = deque()
        with suppress(OSError):  # already ended: reported when waiting for it to be ready
            self.link.send(setup, START_TIMEOUT_S)

    @property
    def is_idle(self) -> bool:
        """True if it waits for items."""
        return self.is_ready and not self.pending

    def hand_out(self, items: list[tuple[int, Any]]) -> None:
        """Assign items to an idle process.

        Raises:
            OSError: it has ended or sent unexpected data; `pending` stays empty.
        """
        self.link.send(Chunk(items), self._answer_timeout_s)
        self.pending.extend(items)
        self.deadline = time.monotonic() + self._answer_timeout_s

    def receive(self) -> Iterator[ItemResult]:
        """Yield the results that have arrived; update `is_ready`.

        Raises:
            EOFError, OSError: the process has ended.
            ProtocolError: it sent an invalid message.
            RewardProcessError: it cannot import the function.
        """
        for message in self.link.receive():
            if isinstance(message, Ready):
                if message.problem is not None:
                    raise RewardProcessError(
                        f"{self._what} processes cannot start: {message.problem}"
                    )
                self.is_ready = True
            elif not self.pending or self.pending[0][0] != message.index:
                raise ProtocolError("a result without a pending item")
            else:
                yield message
                self.pending.popleft()
                self.deadline = time.monotonic() + self._answer_timeout_s

    def ask_to_end(self) -> None:
        """Send SIGTERM; `kill` waits for the end."""
        self._process.terminate()

    def kill(self) -> int:
        """End the process and those it started; return its supervisor's exit code."""
        exit_code = end(self._process)
        self.link.close()  # after the end: the process may still be writing
        return exit_code


def environment_for(args: Any) -> dict[str, str]:
    """Return this process's environment; secret variables only if `args` names them."""
    named = set(_texts(args))
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or not is_secret_variable(name)
    }


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(part)


def _start(link: socket.socket, environment: dict[str, str]) -> subprocess.Popen[Any]:
    fd = link.fileno()
    arguments = [json.dumps(sys.path), str(fd), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=[fd],
        process_group=0,  # out of reach of the terminal's Ctrl-C
    )
