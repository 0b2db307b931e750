"""Memory of this process: its heap and Python's garbage collector."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def trim_heap() -> None:
    """Return free pages of the heap to the kernel.

    glibc keeps pages below memory that is still used, and batches of other lengths leave other
    holes. Without trimming, a process grows for about a hundred steps.
    """
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable the cyclic garbage collector in all threads.

    Plans of many ranks are many small objects without cycles. Unpickling those of 64 ranks takes
    20 times as long with collections, and each collection stops training.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
