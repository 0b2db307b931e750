"""Files that a run can do without: a full or failing disk costs their contents, never the run."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class GrowingFile:
    """A file that grows by whole records; what the disk does not take waits until it does.

    Args:
        path: in a folder that exists.
        end: bytes at its beginning that stay; what follows them is cut off.

    Attributes:
        end: bytes of whole records on disk.
        reason: why the last write failed, or None.

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
        """Records that are not on disk."""
        return len(self._waiting)

    def append(self, record: bytes) -> None:
        """Write a record behind those that wait, or let it wait with them."""
        self._waiting.append(record)
        try:
            self.end += self._write(b"".join(self._waiting))
        except OSError as error:
            self.reason = str(error)
        else:
            self._waiting, self.reason = [], None

    def sync(self) -> None:
        """Wait until the disk has what was written.

        Raises:
            OSError: it does not take it.
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Try once more to write what waits, and close."""
        if self._waiting:
            self.append(b"")
        os.close(self._descriptor)

    def _write(self, data: bytes) -> int:
        """All of it at the end, or nothing: a part would join with the next record."""
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self.end + done)
        except OSError:
            os.ftruncate(self._descriptor, self.end)
            raise
        return done


class SpareFiles:
    """Writes whole files that a run can do without, and counts those that could not be written.

    Attributes:
        failures: how many.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._reasons: dict[str, list[str]] = {}

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Whether `write` went well; of files of one kind (`what`) only the first failure is told.

        Args:
            what: the kind of file, for people.
            write: raises OSError if the disk does not take it.
        """
        try:
            write()
        except OSError as error:
            self.failures += 1
            if what not in self._reasons:
                log.warning("%s could not be written: %s; the run goes on", what, error)
            self._reasons.setdefault(what, []).append(str(error))
            return False
        return True

    def lines(self) -> list[str]:
        """One line for each kind of file that was not always written."""
        return [
            f"{what} could not be written {len(reasons)} time{'s' if len(reasons) > 1 else ''}: "
            f"{reasons[0]}"
            for what, reasons in self._reasons.items()
        ]


def replace_file(path: Path, write: Callable[[Path], object]) -> Path:
    """Have `write` fill a new file that then takes `path`'s place; returns `path`.

    Where that fails, the old file stays and nothing else is left.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        write(new)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    return path
