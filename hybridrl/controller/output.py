"""Standard output and log files: a full disk costs text, never the run, and secrets are hidden."""

import faulthandler
import io
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridrl.config.command.secrets import known_secrets, without
from hybridrl.controller.processes import STACK_SIGNAL


class LossyFile(io.FileIO):
    """A file whose writes never raise OSError; what is lost is told when there is room again.

    What the environment or the command line of this process hold of secrets is hidden in it, and
    so are logins of URIs.

    Args:
        file: an open file's descriptor, which stays open, or a path, to whose end is written.
        secrets: more that are hidden.

    Attributes:
        lost: bytes since the last write that succeeded.
    """

    def __init__(self, file: int | str, secrets: Iterable[str] = ()) -> None:
        opens = isinstance(file, str)
        super().__init__(file, "a" if opens else "w", closefd=opens)
        self.lost = 0
        self._secrets = known_secrets(secrets)

    def write(self, data: Any) -> int:
        """Write what the disk takes; always says that it took everything."""
        size, told = memoryview(data).nbytes, bytes(data).decode(errors="surrogateescape")
        text = without(self._secrets, told).encode(errors="surrogateescape")
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
    """A text stream over a `LossyFile`, to which it writes each line at once."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(file, secrets)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def guard_standard_output() -> None:
    """Keep this program going when what it prints finds no room, and print no secrets."""
    for stream in (0, 1, 2):  # closed: a file that is opened later would get what is printed
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free
            os.set_inheritable(stream, True)
    sys.stdout, sys.stderr = lossy_text(1), lossy_text(2)


def guard_logging(secrets: Iterable[str] = ()) -> None:
    """Let what goes to log files, and what is printed, be lost without harm and hold no secrets.

    To be called when logging has its handlers, which are given new streams.

    Args:
        secrets: more that are hidden from here on, those of a config.
    """
    out, err = lossy_text(1, secrets), lossy_text(2, secrets)
    printed = {sys.stdout: out, sys.stderr: err}
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.setStream(lossy_text(handler.baseFilename, secrets))
        elif isinstance(handler, logging.StreamHandler) and handler.stream in printed:
            handler.setStream(printed[handler.stream])
    sys.stdout, sys.stderr = out, err


def keep_earlier(log_file: Path) -> None:
    """Give a log of an earlier start of the run its number: <node>_rank<k>.1.log is the first."""
    number = 1
    while (earlier := log_file.with_suffix(f".{number}.log")).exists():
        number += 1
    if log_file.exists():
        log_file.rename(earlier)


def redirect_output(path: Path) -> None:
    """Send this process's output to a file: Python's, C++'s, logging's and stacks on a crash.

    Text for which the disk has no room is lost; nobody who prints gets an error.
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
