"""The heap of this process."""

import ctypes
from functools import cache


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back_free_memory() -> None:
    """Give the kernel the whole pages of the heap that nothing uses.

    glibc keeps what was freed below anything that is still used, and batches of other lengths
    leave other holes: without this a process grows for a hundred steps until its heap has room
    for everything. Does nothing where the C library cannot do it (musl).

    Source: malloc_trim(3), which since glibc 2.8 looks at all arenas.
    """
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)
