"""Threads with a result: imports ahead of need, and calls that may block for ever."""

import importlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


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


def import_all(modules: Sequence[str]) -> None:
    """Import modules one after the other."""
    for module in modules:
        importlib.import_module(module)


def import_in_background(modules: Sequence[str]) -> Future[None]:
    """Begin to import modules in a thread, which Python joins at exit."""
    executor = ThreadPoolExecutor(1, "import ahead")
    imported = executor.submit(import_all, modules)
    executor.shutdown(wait=False)
    return imported
