"""Memory of this process: its heap, torch's cache of a GPU's memory, Python's garbage collector."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrl.config.planner.machine import ALLOCATORS
from hybridrl.distributed import torch_compat


def trim_heap() -> None:
    """Return free pages of the heap to the kernel.

    glibc keeps pages below memory that is still used, and batches of other lengths leave other
    holes. Without trimming, a process grows for about a hundred steps.
    """
    ctypes.CDLL(None).malloc_trim(0)


def use_expandable_segments(device: torch.device) -> None:
    """Make torch's cache of a GPU's memory grow in place: batches of other lengths leave no holes.

    Call it once vLLM has started: graphs with its all-reduce need memory that is not expandable.
    Settings of the user, such as PYTORCH_ALLOC_CONF, are kept.
    """
    if device.type == "cuda" and not any(map(os.environ.get, ALLOCATORS)):
        torch_compat.set_allocator("expandable_segments:True")


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
