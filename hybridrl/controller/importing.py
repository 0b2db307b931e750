"""Importing what takes long while something else is waited for."""

import importlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor


def import_all(modules: Sequence[str]) -> None:
    """Import modules, one after the other."""
    for module in modules:
        importlib.import_module(module)


def import_in_thread(modules: Sequence[str]) -> Future[None]:
    """Begin to import modules; what is returned waits, and raises what an import raised."""
    thread = ThreadPoolExecutor(1, "import ahead")
    done = thread.submit(import_all, modules)
    thread.shutdown(wait=False)
    return done
