"""Threads with a result: imports ahead of need, and calls that may block for ever."""

import atexit
import gc
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Name of threads with calls that may block for ever.
MAY_BLOCK = "may block"


def run_in_background(function: Callable[..., T], *arguments: Any, name: str) -> Future[T]:
    """Run a function in a daemon thread of this name.

    Not an executor: at exit, Python joins an executor's threads, even one that never returns.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_with_timeout(timeout_s: float, function: Callable[[], T]) -> T:
    """Call a function that may block for ever; TimeoutError if it has not returned in time.

    Without the head node, Ray's control calls wait a minute and then end the process.
    """
    return run_in_background(function, name=MAY_BLOCK).result(timeout_s)


def join_abandoned_calls(timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds for calls abandoned by `call_with_timeout`."""
    deadline = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name == MAY_BLOCK:
            thread.join(max(deadline - time.monotonic(), 0.0))


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block: collections are a sixth of the time of large imports.

    What exists at its end is left out of later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries report at exit what was not collected


def import_all(modules: Sequence[str]) -> None:
    """Import modules one after the other."""
    with without_collections():
        for module in modules:
            importlib.import_module(module)


def import_in_background(modules: Sequence[str]) -> Future[None]:
    """Begin to import modules in a thread, which Python joins at exit."""
    return ThreadPoolExecutor(1, "import ahead").submit(import_all, modules)
