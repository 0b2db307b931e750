"""The reward process: takes chunks of items, answers each item as it is done.

It imports nothing but the reward function's module and the standard library. The parent starts
it by `main`; messages are those of `hybridrl.rewards.messages`.
"""

import ctypes
import math
import os
import signal
import traceback
from multiprocessing.connection import Connection
from types import FrameType

from hybridrl.config.errors import ConfigError
from hybridrl.rewards.base import Reward, RewardItem, Score, as_score, resolve_function
from hybridrl.rewards.messages import Answer, Chunk, FailureKind, Ready, Setup

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
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
    _die_with(parent)
    connection = Connection(fd)
    setup: Setup = connection.recv()
    try:
        function = resolve_function(setup.function)
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
            connection.send(_answer(index, function, item, setup))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while a reward runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def _answer(index: int, function: Reward, item: RewardItem, setup: Setup) -> Answer:
    """The item's score, or why it has none. A reward may raise anything, SystemExit included."""
    try:
        score = _limited(function, item, setup)
    except ItemTimeout:
        reason = f"took longer than {setup.timeout_s:g} s"
        return Answer(index, math.nan, {}, FailureKind.timeout, reason, traceback.format_exc())
    except BaseException as error:
        text = traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]
        return Answer(index, math.nan, {}, FailureKind.error, _one_line(error), text)
    return Answer(index, score.total, score.parts)


def _limited(function: Reward, item: RewardItem, setup: Setup) -> Score:
    """The reward, all numbers finite; interrupted by ItemTimeout when its time is over."""
    # Anew for each item: rewards may use SIGALRM themselves.
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, setup.timeout_s)
    try:
        return as_score(function(*item, **setup.args), setup.function)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise ItemTimeout


def _one_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()
