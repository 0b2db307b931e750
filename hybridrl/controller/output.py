"""Standard output and log files that survive a full disk and hide secrets."""

import faulthandler
import io
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridrl.config.command.secrets import known_secrets, without

# Makes a process write the stacks of its threads.
STACK_SIGNAL = signal.SIGUSR1


class LossyFile(io.FileIO):
    """File whose writes never raise OSError; a later write reports the bytes lost.

    Secrets of the environment and the command line, and logins in URIs, are hidden.

    Args:
        file: descriptor, which stays open, or path of a file to append to.
        secrets: additional secrets to hide.
    """

    def __init__(self, file: int | str, secrets: Iterable[str] = ()) -> None:
        opens = isinstance(file, str)
        super().__init__(file, "a" if opens else "w", closefd=opens)
        self.lost = 0
        self._secrets = known_secrets(secrets)

    def write(self, data: Any) -> int:
        """Write as much as the disk has room for; return the full size in any case."""
        size, original = memoryview(data).nbytes, bytes(data).decode(errors="surrogateescape")
        text = without(self._secrets, original).encode(errors="surrogateescape")
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


def lossy_text(file: int | str, secrets: Iterable[str] = ()) -> io.TextIOWrapper:
    """Return a line-buffered text stream over a `LossyFile`."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(file, secrets)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def guard_standard_output() -> None:
    """Make standard output survive a full disk or a closed stream, and hide secrets."""
    for stream in (0, 1, 2):  # if closed, a file opened later would receive the output
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor
            os.set_inheritable(stream, True)
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)


def guard_logging(secrets: Iterable[str] = ()) -> None:
    """Make log files and standard output survive a full disk, and hide more secrets.

    Call it after logging is configured: the handlers get new streams.
    """
    out, err = lossy_text(1, secrets), lossy_text(2, secrets)
    printed = {sys.stdout: out, sys.stderr: err}
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setStream(lossy_text(handler.baseFilename, secrets))
        elif isinstance(handler, logging.StreamHandler) and handler.stream in printed:
            handler.setStream(printed[handler.stream])
    sys.stdout, sys.stderr = out, err


def rotate_log(log_file: Path) -> None:
    """Rename the log of an earlier start to <node>_rank<k>.<n>.log, n counted from 1."""
    number = 1
    while (earlier := log_file.with_suffix(f".{number}.log")).exists():
        number += 1
    if log_file.exists():
        log_file.rename(earlier)


def redirect_output(path: Path) -> None:
    """Send this process's output to a file: Python's, C++'s, logging's and stacks on a crash.

    Text is lost without an error if the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, 2)
