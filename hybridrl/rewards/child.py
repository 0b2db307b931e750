"""The reward process: takes chunks of items, answers each item as it is done.

It imports nothing but the modules of task and function and the standard library. The parent starts
it by `main`; messages are those of `hybridrl.rewards.messages`.
"""

import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from hybridrl.config.classes import locate
from hybridrl.config.errors import ConfigError
from hybridrl.rewards.kernel import die_with
from hybridrl.rewards.messages import Answer, Chunk, FailureKind, Ready, Setup

_MAX_TRACEBACK_CHARS = 4000


class ItemTimeout(BaseException):
    """The item's time is over. No Exception, or the reward's own handlers would swallow it."""


def main(fd: int, parent: int) -> None:
    """Serve the parent until it closes the connection or dies.

    Args:
        fd: of the connection's end, inherited.
        parent: the parent's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    die_with(parent)  # even while a reward runs
    connection = Connection(fd)
    setup: Setup = connection.recv()
    try:
        task = locate("task", setup.task)(setup.function, setup.args)
    except ConfigError as error:
        connection.send(Ready(str(error)))
        return
    connection.send(Ready())
    while True:
        try:
            chunk: Chunk = connection.recv()
        except EOFError:
            return
        for index, item in chunk.items:
            connection.send(_answer(index, task, item, setup.timeout_s))


def _answer(index: int, task: Callable[[Any], Any], item: Any, timeout_s: float) -> Answer:
    """The item's value, or why it has none. A task may raise anything, SystemExit included."""
    try:
        return Answer(index, _limited(task, item, timeout_s))
    except ItemTimeout:
        reason = f"took longer than {timeout_s:g} s"
        return Answer(index, None, FailureKind.timeout, reason, traceback.format_exc())
    except BaseException as error:
        text = traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]
        return Answer(index, None, FailureKind.error, _one_line(error), text)


def _limited(task: Callable[[Any], Any], item: Any, timeout_s: float) -> Any:
    """What the task makes of the item; interrupted by ItemTimeout when its time is over."""
    # Anew for each item: rewards may use SIGALRM themselves.
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return task(item)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise ItemTimeout


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
