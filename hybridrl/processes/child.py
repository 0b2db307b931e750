"""Entry of a pool's processes: receives chunks of items, sends one result per item.

A task computes one item after the other; an async task has all items that it was given under way.
Each call gets a copy of its item: those of one message may share the row of the data set.
The process imports only the standard library and the modules of task and function.
"""

import asyncio
import copy
import importlib
import inspect
import signal
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from types import FrameType
from typing import Any

from hybridrl.processes.messages import END_S, START, Failure, FailureKind, Setup
from hybridrl.processes.process import ChildEnd
from hybridrl.processes.texts import user_traceback

_MAX_REASON_CHARS = 500
# For asyncio.to_thread in rewards; started as needed. Python's default follows the cores.
_MAX_THREADS = 1024


class ItemTimeout(BaseException):
    """Time limit of an item; a BaseException, which the reward's own handlers do not catch."""


def serve(link: ChildEnd) -> None:
    """Compute the items of a pool until it closes the connection."""
    setup: Setup = link.receive()
    module, _, name = setup.task.rpartition(".")
    try:
        make = vars(importlib.import_module(module))[name]
        task = make(setup.function, setup.args, **setup.options)
    except ValueError as error:  # what the user can correct; after others the pool tries again
        reason = f"{type(error).__name__}: {error}"
        link.send((START, FailureKind.error, type(error).__name__, reason))
        return
    is_async = inspect.iscoroutinefunction(task)
    link.send((START, is_async))
    if is_async:
        asyncio.run(_serve_async(link, task, setup.timeout_s))
    while True:
        for index, item in link.receive():
            link.send(_result(index, task, item, setup.timeout_s))


async def _serve_async(
    link: ChildEnd, task: Callable[[Any], Awaitable[Any]], timeout_s: float
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    under_way: set[asyncio.Task[None]] = set()  # the loop itself does not keep them alive
    awaited: set[int] = set()

    def answer(index: int, *result: object) -> None:
        """Send an item's first result."""
        if index in awaited:
            link.send((index, *result))
            awaited.remove(index)

    async def compute(index: int, item: Any) -> None:
        limit = asyncio.timeout(timeout_s)
        # What has not ended then goes on without its result, and holds up no other item.
        late = _failure(index, TimeoutError(), timeout_s)
        giving_up = loop.call_later(timeout_s + END_S, answer, *late)
        try:
            async with limit:
                answer(index, await task(copy.deepcopy(item)))
        except BaseException as error:
            timed_out = limit.expired() and isinstance(error, TimeoutError)
            answer(*_failure(index, error, timeout_s if timed_out else None))
        finally:
            giving_up.cancel()

    while True:
        for index, item in await loop.run_in_executor(None, link.receive):
            awaited.add(index)
            job = asyncio.create_task(compute(index, item))
            under_way.add(job)
            job.add_done_callback(under_way.discard)


def _result(index: int, task: Callable[[Any], Any], item: Any, timeout_s: float) -> tuple[Any, ...]:
    """Return the message of an item's value or failure. A task may raise anything."""
    try:
        return index, limited(task, copy.deepcopy(item), timeout_s)
    except BaseException as error:
        return _failure(index, error, timeout_s if isinstance(error, ItemTimeout) else None)


def _failure(index: int, error: BaseException, timeout_s: float | None) -> tuple[Any, ...]:
    """Return the message of an item that raised, or exceeded the limit `timeout_s`."""
    trace = user_traceback(error)
    if timeout_s is not None:
        reason = f"took longer than {timeout_s:g} s"
        return astuple(Failure(index, FailureKind.timeout, reason, trace))
    summary = traceback.TracebackException.from_exception(error)
    summary.__notes__ = None  # these are in the traceback
    reason = list(summary.format_exception_only())[-1].strip().splitlines()[0]
    reason = reason.removeprefix(f"{type(error).__module__}.")
    return astuple(Failure(index, FailureKind.error, reason[:_MAX_REASON_CHARS], trace))


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
