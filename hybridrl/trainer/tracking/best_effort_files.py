"""Best-effort files: a full or failing disk costs their contents, never the run."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class AppendOnlyFile:
    """File of whole records; records that cannot be written wait in memory and are retried.

    Of an existing file, `end` bytes are kept.

    Attributes:
        end: bytes of whole records on disk.
        reason: of the last failed write, or None.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, end: int = 0) -> None:
        self.end = end
        self.reason: str | None = None
        self._waiting: list[bytes] = []
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, end)

    @property
    def waiting(self) -> int:
        """Number of records not on disk."""
        return len(self._waiting)

    def append(self, record: bytes) -> None:
        """Write the waiting records and this one; after an error all of them wait."""
        self._waiting.append(record)
        try:
            self.end += self._write(b"".join(self._waiting))
        except OSError as error:
            self.reason = str(error)
        else:
            self._waiting, self.reason = [], None

    def sync(self) -> None:
        """Fsync the file; raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Retry the waiting records once, and close."""
        if self._waiting:
            self.append(b"")
        os.close(self._descriptor)

    def _write(self, data: bytes) -> int:
        """Append all data or none: a part would corrupt the next record."""
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.end + done)
        except OSError:
            os.ftruncate(self._descriptor, self.end)
            raise
        return done


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

    After a failure the old file is unchanged.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path
