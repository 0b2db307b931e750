"""The most private memory that a process holds while something runs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
# Seconds between two looks: less than it takes to fill 10 MB.
LOOK_S = 0.002


PRIVATE = ("RssAnon", "RssShmem")


def private_bytes(*kinds: str) -> int:
    """Memory of this process of these kinds, by default all that no file backs.

    Not VmHWM or ru_maxrss: these count the pages of mapped checkpoints, which the kernel takes
    back whenever somebody needs memory.
    """
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return sum(1024 * int(lines[key].split()[0]) for key in kinds or PRIVATE)


@contextmanager
def peak_in(found: dict[str, Any], name: str, *kinds: str) -> Iterator[Callable[[], float]]:
    """Note under `name` the largest `private_bytes` while the block runs.

    Yields what returns, inside the block, the CPU seconds that looking has taken so far.
    """
    done, peak = threading.Event(), private_bytes(*kinds)

    def look() -> None:
        nonlocal peak
        while not done.wait(LOOK_S):
            peak = max(peak, private_bytes(*kinds))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield partial(time.clock_gettime, time.pthread_getcpuclockid(thread.ident))
    finally:
        done.set()
        thread.join()
        found[name] = max(peak, private_bytes(*kinds))
