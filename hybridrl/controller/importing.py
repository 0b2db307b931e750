"""Importing what takes long while something else is waited for."""

import importlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

logger = logging.getLogger(__name__)


def import_all(modules: Sequence[str]) -> None:
    """Import modules, one after the other; the log says how long it took."""
    start = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    logger.info("%s imported in %.1f s", ", ".join(modules), time.perf_counter() - start)


def import_in_thread(modules: Sequence[str]) -> Future[None]:
    """Begin to import modules; what is returned waits, and raises what an import raised."""
    thread = ThreadPoolExecutor(1, "import ahead")
    done = thread.submit(import_all, modules)
    thread.shutdown(wait=False)
    return done
