"""Freed memory goes back to the kernel."""

import psutil

from hybridrl.distributed.process_memory import trim_heap

BLOCK_BYTES, BLOCKS = 64 * 1024, 3000


def test_pages_between_blocks_that_are_used_are_given_back():
    """Blocks of this size come from the heap; every 20th stays, so that glibc keeps the others."""
    blocks = [bytearray(b"x" * BLOCK_BYTES) for _ in range(BLOCKS)]
    kept = blocks[::20]
    used = psutil.Process().memory_info().rss
    del blocks
    trim_heap()
    given_back = used - psutil.Process().memory_info().rss
    assert given_back > 0.8 * BLOCK_BYTES * (BLOCKS - len(kept))
