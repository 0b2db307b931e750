"""Read-ahead: brings a checkpoint into the page cache in the background."""

import logging
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20


def read_ahead(folder: Path) -> threading.Thread:
    """Read a folder's weights in a thread and return the thread.

    The content is dropped; the kernel caches it until memory is short.
    """
    files = sorted(folder.glob("*.safetensors"))
    thread = threading.Thread(target=_read, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    start, num_bytes, block = time.perf_counter(), 0, bytearray(BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                num_bytes += count
    seconds = time.perf_counter() - start
    logger.info("read %.0f MB of weights ahead in %.1f s", num_bytes / 1e6, seconds)
