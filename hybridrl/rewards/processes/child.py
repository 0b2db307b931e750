"""Main loop of a reward process: receives chunks of items, sends one result per item.

A task computes one item after the other; an async task has all items that it was given under way.
Each call gets a copy of its item: those of one message may share the row of the data set.
The process imports only the standard library and the modules of task and function. `main` leaves a
supervisor process between parent and child.
"""

import asyncio
import copy
import inspect
import os
import signal
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.supervisor import supervise
from hybridrl.config.user_code.tracebacks import user_traceback
from hybridrl.rewards.processes.messages import (
    FOLDER,
    START,
    ChildEnd,
    Failure,
    FailureKind,
    Indexed,
)

_MAX_REASON_CHARS = 500
# For asyncio.to_thread in rewards; started as needed. Python's default follows the cores.
_MAX_THREADS = 1024


class ItemTimeout(BaseException):
    """Time limit of an item; a BaseException, which the reward's own handlers do not catch."""


def main(fd: int, parent: int) -> None:
    """Serve the parent of this process id until it closes the connection `fd` or dies."""
    supervise(parent, fd, os.environ[FOLDER])
    link = ChildEnd(fd)
    setup = link.receive()
    try:
        task = locate("task", setup.task)(setup.function, setup.args, **setup.options)
    except ConfigError as error:
        link.send(Failure(START, FailureKind.error, "ConfigError", str(error)))
        return
    is_async = inspect.iscoroutinefunction(task)
    link.send((START, is_async))
    with suppress(EOFError):
        if is_async:
            asyncio.run(_serve_async(link, task, setup.timeout_s))
        else:
            _serve(link, task, setup.timeout_s)


def _serve(link: ChildEnd, task: Callable[[Any], Any], timeout_s: float) -> None:
    while True:
        for index, item in link.receive():
            link.send(_result(index, task, item, timeout_s))


async def _serve_async(
    link: ChildEnd, task: Callable[[Any], Awaitable[Any]], timeout_s: float
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    under_way: set[asyncio.Task[None]] = set()  # the loop itself does not keep them alive
    while True:
        for index, item in await loop.run_in_executor(None, link.receive):
            job = asyncio.create_task(_answer(link, index, task, item, timeout_s))
            under_way.add(job)
            job.add_done_callback(under_way.discard)


async def _answer(
    link: ChildEnd,
    index: int,
    task: Callable[[Any], Awaitable[Any]],
    item: Any,
    timeout_s: float,
) -> None:
    """Compute an item within its time limit and send its value or failure."""
    found: Indexed | Failure
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            found = index, await task(copy.deepcopy(item))
    except BaseException as error:
        timed_out = limit.expired() and isinstance(error, TimeoutError)
        found = _failure(index, error, timeout_s if timed_out else None)
    link.send(found)


def _result(
    index: int, task: Callable[[Any], Any], item: Any, timeout_s: float
) -> Indexed | Failure:
    """Return the item's value or failure. A task may raise anything, including SystemExit."""
    try:
        return index, limited(task, copy.deepcopy(item), timeout_s)
    except BaseException as error:
        return _failure(index, error, timeout_s if isinstance(error, ItemTimeout) else None)


def _failure(index: int, error: BaseException, timeout_s: float | None) -> Failure:
    """Return the failure of an item that raised, or exceeded the limit `timeout_s`."""
    trace = user_traceback(error)
    if timeout_s is not None:
        return Failure(index, FailureKind.timeout, f"took longer than {timeout_s:g} s", trace)
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None  # these are in the traceback
    reason = list(told.format_exception_only())[-1].strip().splitlines()[0]
    reason = reason.removeprefix(f"{type(error).__module__}.")
    return Failure(index, FailureKind.error, reason[:_MAX_REASON_CHARS], trace)


def limited(task: Callable[[Any], Any], item: Any, timeout_s: float) -> Any:
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
