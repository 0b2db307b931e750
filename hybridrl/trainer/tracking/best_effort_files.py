"""Best-effort files: a full or failing disk costs their contents, never the run."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class JsonLines:
    """JSON-lines file that begins with the rows `before`; others of an existing file are removed.

    Rows that cannot be written wait in memory and are retried.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, before: Iterable[Mapping[str, Any]]) -> None:
        kept = b"".join(map(_line, before))
        if not (path.is_file() and path.read_bytes().startswith(kept)):
            replace_file(path, lambda new: new.write_bytes(kept))
        self._name = path.name
        self._end = len(kept)
        self._reason = ""
        self._waiting: list[bytes] = []
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, self._end)

    @property
    def waiting(self) -> int:
        """Number of rows not on disk."""
        return len(self._waiting)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the waiting rows and this one; after an error, which is logged, all wait."""
        self._waiting.append(_line(row))
        self._write()
        if len(self._waiting) == 1:
            log.warning("%s cannot be written: %s; rows wait for room", self._name, self._reason)

    def sync(self) -> None:
        """Fsync the file, except rows that wait; raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Retry the waiting rows once, and close."""
        self._write()
        os.close(self._descriptor)

    def lines(self) -> list[str]:
        """Describe the waiting rows in one line, if there are any."""
        rows = f"{self.waiting} row{'s' if self.waiting != 1 else ''} of {self._name}"
        return [f"{rows} could not be written: {self._reason}"] if self.waiting else []

    def _write(self) -> None:
        """Append all waiting rows or none: a part would corrupt the next row."""
        data, done = b"".join(self._waiting), 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self._end + done)
        except OSError as error:
            self._reason = str(error)
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
        else:
            self._waiting, self._end = [], self._end + done


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


class BestEffortFiles:
    """Writer of whole files; failures are counted, not raised."""

    def __init__(self) -> None:
        self.failures = 0
        self._reasons: dict[str, list[str]] = {}

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """Call `write`; log the first OSError of a kind of file."""
        try:
            write()
        except OSError as error:
            self.failures += 1
            if what not in self._reasons:
                log.warning("%s could not be written: %s; the run goes on", what, error)
            self._reasons.setdefault(what, []).append(str(error))

    def lines(self) -> list[str]:
        """Describe each kind of file with failures in one line."""
        return [
            f"{what} could not be written {len(reasons)} time{'s' if len(reasons) > 1 else ''}: "
            f"{reasons[0]}"
            for what, reasons in self._reasons.items()
        ]


def replace_text(path: Path, text: str) -> Path:
    """Replace a file atomically by a text; return `path`."""
    return replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Replace a file atomically by one that `write` fills; return `path`.

    After a failure the old file is unchanged. Processes may do so at the same time, such as a run
    that ends and a user who writes its report.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path
