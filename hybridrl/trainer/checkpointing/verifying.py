"""What the user is told while a large checkpoint is read and compared with its checksums."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

# Seconds until the first line, and from each to the next one: small checkpoints take less.
FIRST_S, EVERY_S = 3.0, 10.0


class VerificationEnded(Exception):
    """Nobody waits for its result any more."""


class Verifying:
    """A watch over verifications that tells how they get on.

    A context manager: leaving it ends one that another thread is at, within a second.

    Args:
        tell: gets each line.
        clock: seconds that only grow.
    """

    def __init__(
        self, tell: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._is_left = threading.Event()
        self._folder: Path | None = None
        self._start = self._next = 0.0

    def __enter__(self) -> "Verifying":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left.set()

    def __call__(self, folder: Path, read: int, size: int) -> None:
        """Tell the user where it is time for it.

        Args:
            folder: of the checkpoint.
            read, size: bytes of it, so far and in all.

        Raises:
            VerificationEnded: the block has been left.
        """
        if self._is_left.is_set():
            raise VerificationEnded
        now = self._clock()
        if folder != self._folder:
            self._folder, self._start, self._next = folder, now, now + FIRST_S
        if now < self._next:
            return
        self._next = now + EVERY_S
        done = read / max(size, 1)
        left = timedelta(seconds=round((now - self._start) * (1 / done - 1))) if read else "?"
        self._tell(f"Verifying {folder}: {done:.0%} of {size / 2**30:,.1f} GiB, ETA {left}")
