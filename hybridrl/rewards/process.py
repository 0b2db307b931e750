"""A pool's handle on one reward process: start, hand out work, notice its end, kill.

The process is a fresh Python, neither forked (this one has threads) nor spawned by
multiprocessing (which would import the program's main module, and with it torch, once more).
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
from hybridrl.rewards.messages import Answer, Chunk, Ready, Setup
from hybridrl.rewards.wire import GarbledError, ParentEnd

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
    """One process that computes rewards or steps environments, under its supervisor.

    It starts in the background.

    Args:
        setup: what it computes.
        what: names it in errors ("reward").

    Attributes:
        link: to wait on; readable when an answer has come or the process has ended.
        deadline: time.monotonic() at which the process has failed to answer.
        is_ready: whether it has started up.
        pending: items handed out and not answered, the one being computed first.
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
        with suppress(OSError):  # ended already: the wait for it to be ready will tell
            self.link.send(setup, START_TIMEOUT_S)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work."""
        return self.is_ready and not self.pending

    def hand_out(self, items: list[tuple[int, Any]]) -> None:
        """Give an idle process items to compute.

        Raises:
            OSError: it has ended, or misbehaves; `pending` stays empty.
        """
        self.link.send(Chunk(items), self._answer_timeout_s)
        self.pending.extend(items)
        self.deadline = time.monotonic() + self._answer_timeout_s

    def receive(self) -> Iterator[Answer]:
        """The answers that have come; that it is ready is noted.

        Raises:
            EOFError, OSError: the process has ended.
            GarbledError: it has written something else.
            RewardProcessError: it cannot find the function, although this process could.
        """
        for message in self.link.receive():
            if isinstance(message, Ready):
                if message.problem is not None:
                    raise RewardProcessError(
                        f"{self._what} processes cannot start: {message.problem}"
                    )
                self.is_ready = True
            elif not self.pending or self.pending[0][0] != message.index:
                raise GarbledError("an answer to nothing asked")
            else:
                yield message
                self.pending.popleft()
                self.deadline = time.monotonic() + self._answer_timeout_s

    def ask_to_end(self) -> None:
        """Have it end; `kill` waits for that."""
        self._process.terminate()

    def kill(self) -> int:
        """End the process and those that it started; return its supervisor's exit code."""
        exit_code = end(self._process)
        self.link.close()  # not before: it may be writing
        return exit_code


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
