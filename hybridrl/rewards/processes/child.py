"""Main loop of a reward process: receives chunks of items, sends one result per item.

It imports only the standard library and the modules of task and function. `main` leaves a
supervisor process between parent and child.
"""

import signal
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.supervisor import supervise
from hybridrl.rewards.processes.messages import START, ChildEnd, Failure, FailureKind, Indexed

_MAX_TRACEBACK_CHARS, _MAX_REASON_CHARS = 4000, 500


class ItemTimeout(BaseException):
    """Time limit of an item; a BaseException, which the reward's own handlers do not catch."""


def main(fd: int, parent: int) -> None:
    """Serve the parent of this process id until it closes the connection `fd` or dies."""
    supervise(parent, fd)
    link = ChildEnd(fd)
    setup = link.receive()
    try:
        task = locate("task", setup.task)(setup.function, setup.args)
    except ConfigError as error:
        link.send(Failure(START, FailureKind.error, str(error)))
        return
    link.send((START, None))
    while True:
        try:
            chunk = link.receive()
        except EOFError:
            return
        for index, item in chunk:
            link.send(_result(index, task, item, setup.timeout_s))


def _result(
    index: int, task: Callable[[Any], Any], item: Any, timeout_s: float
) -> Indexed | Failure:
    """Return the item's value or failure. A task may raise anything, including SystemExit."""
    try:
        return index, _limited(task, item, timeout_s)
    except ItemTimeout:
        reason = f"took longer than {timeout_s:g} s"
        return Failure(index, FailureKind.timeout, reason, traceback.format_exc())
    except BaseException as error:
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        trace = traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]
        return Failure(index, FailureKind.error, reason[:_MAX_REASON_CHARS], trace)


def _limited(task: Callable[[Any], Any], item: Any, timeout_s: float) -> Any:
    """Compute `task(item)`, interrupted by ItemTimeout after `timeout_s`."""
    # Set for each item: rewards may use SIGALRM themselves.
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        return task(item)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise ItemTimeout
