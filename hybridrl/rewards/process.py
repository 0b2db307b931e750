"""A pool's handle on one reward process: start, hand out work, notice its end, kill.

The process is a fresh Python, neither forked (this one has threads) nor spawned by
multiprocessing (which would import the program's main module, and with it torch, once more).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from hybridrl.config.secrets import is_secret_variable
from hybridrl.rewards.messages import Answer, Chunk, Ready, Setup

START_TIMEOUT_S = 120.0
# The process stops a late reward itself; one that keeps it from doing so is killed this much later.
KILL_AFTER_S = 1.0

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hybridrl.rewards.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RewardProcessError(RuntimeError):
    """The processes of a pool do not start up, for a reason that lies with no item."""


class RewardProcess:
    """One process that computes rewards or steps environments. Starts in the background.

    Args:
        setup: what it computes.
        what: names it in errors ("reward").

    Attributes:
        connection: to wait on; readable when an answer has come or the process has ended.
        deadline: time.monotonic() at which the process has failed to answer.
        is_ready: whether it has started up.
        pending: items handed out and not answered, the one being computed first.
    """

    def __init__(self, setup: Setup, what: str) -> None:
        self._what = what
        self._answer_timeout_s = setup.timeout_s + KILL_AFTER_S
        self.connection, theirs = Pipe()
        self._process = _start(theirs, environment_for(setup.args))
        theirs.close()
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.is_ready = False
        self.pending: deque[tuple[int, Any]] = deque()
        with suppress(OSError):  # ended already: the wait for it to be ready will tell
            self.connection.send(setup)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work."""
        return self.is_ready and not self.pending

    def hand_out(self, items: list[tuple[int, Any]]) -> None:
        """Give an idle process items to compute.

        Raises:
            OSError: it has ended; `pending` stays empty.
        """
        self.connection.send(Chunk(items))
        self.pending.extend(items)
        self.deadline = time.monotonic() + self._answer_timeout_s

    def receive(self) -> Answer | None:
        """The next answer, or None if it only reports that it is ready.

        Raises:
            EOFError, OSError: the process has ended.
            RewardProcessError: it cannot find the function, although this process could.
        """
        message: Answer | Ready = self.connection.recv()
        if isinstance(message, Ready):
            if message.problem is not None:
                raise RewardProcessError(f"{self._what} processes cannot start: {message.problem}")
            self.is_ready = True
            return None
        index, _ = self.pending.popleft()
        assert index == message.index, (index, message.index)
        self.deadline = time.monotonic() + self._answer_timeout_s
        return message

    def kill(self) -> int:
        """End the process and those that it started; return its exit code (-signal if killed)."""
        self.connection.close()
        # Until it is waited for, the process holds its id; later the group might be another's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def environment_for(args: Any) -> dict[str, str]:
    """This process's variables, but of those that hold secrets only what `args` names."""
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


def _start(connection: Connection, environment: dict[str, str]) -> subprocess.Popen[Any]:
    fd = connection.fileno()
    arguments = [json.dumps(sys.path), str(fd), str(os.getpid())]
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        env=environment,
        pass_fds=[fd],
        process_group=0,  # out of reach of the terminal's Ctrl-C, and killed as a whole
    )
