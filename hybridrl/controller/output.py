"""Standard output and log files: a full disk costs text, never the run, and secrets are hidden."""

import io
import os
import sys
from typing import Any

from hybridrl.config.secrets import HIDDEN, secrets_of


class LossyFile(io.FileIO):
    """A file whose writes never raise OSError; what is lost is told when there is room again.

    What the environment or the command line of this process hold of secrets is hidden in it.

    Args:
        file: an open file's descriptor, which stays open, or a path, to whose end is written.

    Attributes:
        lost: bytes since the last write that succeeded.
    """

    def __init__(self, file: int | str) -> None:
        opens = isinstance(file, str)
        super().__init__(file, "a" if opens else "w", closefd=opens)
        self.lost = 0
        self._secrets = [text.encode() for text in secrets_of(os.environ, sys.argv)]

    def write(self, data: Any) -> int:
        """Write what the disk takes; always says that it took everything."""
        size, text = memoryview(data).nbytes, bytes(data)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN.encode())
        try:
            if self.lost:
                super().write(f"\n[{self.lost} bytes of output are lost: no room]\n".encode())
                self.lost = 0
            done = 0
            while done < len(text):
                done += super().write(text[done:]) or 0
        except OSError:
            self.lost += len(text)
        return size


def lossy_text(file: int | str) -> io.TextIOWrapper:
    """A text stream over a `LossyFile`, to which it writes each line at once."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(file)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def guard_standard_output() -> None:
    """Let this program go on when what it prints finds no room, and print no secrets."""
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
