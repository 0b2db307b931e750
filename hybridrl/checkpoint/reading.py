"""Reading from disks that fail for a moment, as those behind a network do.

Only what is proven wrong is damage. What cannot be read may be whole.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# Seconds between the attempts to read something.
PAUSES_S = (0.2, 1.0, 3.0)
# Nothing has this name, or nothing can have it.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}

_T = TypeVar("_T")


class UnreadableFile(OSError):
    """A file or folder could not be read, however often that was tried; `filename` says which."""


def patiently(
    read: Callable[[Path], _T], path: Path, wait: Callable[[float], None] = time.sleep
) -> _T:
    """What `read(path)` returns, tried again for some seconds where the disk fails.

    Args:
        read: reads a file or folder, from its beginning.
        path: of it.
        wait: takes the seconds up to the next attempt; what it raises ends them.

    Raises:
        FileNotFoundError: there is nothing of this name.
        UnreadableFile: each attempt failed; with the last error's number and text.
    """
    pauses = iter(PAUSES_S)
    while True:
        try:
            return read(path)
        except OSError as error:
            details = (error.errno, error.strerror, str(path))
            if error.errno in _ABSENT:
                raise FileNotFoundError(*details) from error
            pause = next(pauses, None)
            if pause is None:
                raise UnreadableFile(*details) from error
        wait(pause)


def names_in(folder: Path) -> list[str]:
    """What a folder holds, read as by `patiently`; nothing if there is no such folder."""
    try:
        return patiently(os.listdir, folder)
    except FileNotFoundError:
        return []
