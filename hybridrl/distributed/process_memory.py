"""Memory of this process: its heap, torch's cache of a GPU's memory, Python's garbage collector."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrl.config.planner.machine import ALLOCATORS
from hybridrl.distributed import torch_compat

# Share of a GPU that is free before an update, or torch's cache is given back.
LEAST_FREE = 0.1


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


def give_back_scarce_memory(device: torch.device) -> None:
    """Give torch's cache of a GPU's memory back to the GPU if less than `LEAST_FREE` is free.

    Batches of other lengths leave other holes in it. In an H100's 80 GiB, where 10 GiB were holes,
    the second update of a run found no room that the first one had.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < LEAST_FREE * total:
        torch.cuda.empty_cache()


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
