"""Standard output and log files on a disk that may be full: text is lost there, never the run."""

import io
import os
import stat
import sys
from typing import Any


class LossyFile(io.FileIO):
    """A file whose writes never raise OSError; what is lost is told when there is room again.

    Args:
        file: an open file's descriptor, which stays open, or a path, to whose end is written.

    Attributes:
        lost: bytes since the last write that succeeded.
    """

    def __init__(self, file: int | str) -> None:
        opens = isinstance(file, str)
        super().__init__(file, "a" if opens else "w", closefd=opens)
        self.lost = 0

    def write(self, data: Any) -> int:
        """Write what the disk takes; always says that it took everything."""
        view = memoryview(data).cast("B")
        try:
            if self.lost:
                super().write(f"\n[{self.lost} bytes of output are lost: no room]\n".encode())
                self.lost = 0
            done = 0
            while done < len(view):
                done += super().write(view[done:]) or 0
        except OSError:
            self.lost += len(view)
        return len(view)


def lossy_text(file: int | str) -> io.TextIOWrapper:
    """A text stream over a `LossyFile`, to which it writes each line at once."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(file)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def spare_standard_output() -> None:
    """Let this program go on when the file that its output goes to, if it is one, has no room."""
    if stat.S_ISREG(os.fstat(1).st_mode):
        sys.stdout = lossy_text(1)
    if stat.S_ISREG(os.fstat(2).st_mode):
        sys.stderr = lossy_text(2)
