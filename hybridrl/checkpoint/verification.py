"""Is a checkpoint what was written? Sizes first, which is fast, then checksums."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.manifest import FileRecord, Manifest
from hybridrl.checkpoint.names import MANIFEST, STATE, promised_step

# Hashing takes a core per file; a disk is busy with fewer readers than a machine has cores.
_READERS = 8
_BLOCK = 2**20  # bytes
# Seconds between two looks at how far the readers are.
_LOOK_S = 0.2

# Gets a checkpoint's folder, the bytes of it that have been read and those that it has, several
# times a second while its files are read. What it raises ends the reading.
Watch = Callable[[Path, int, int], None]


def unwatched(folder: Path, read: int, size: int) -> None:
    """A watch that lets the reading go on."""


def digest(path: Path, note: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Size and SHA-256 of a file; to be called by the process that wrote it.

    Args:
        path: of the file.
        note: gets the bytes of each block that was read; what it raises ends the reading.

    Raises:
        OSError: it cannot be read.
    """
    content, size, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            content.update(block[:count])
            size += count
            note(count)
    return FileRecord(size, content.hexdigest())


def verify(folder: Path, *, checksums: bool = True, watch: Watch = unwatched) -> Manifest:
    """The manifest of a checkpoint whose files are all as it says.

    A file in state/ that the manifest does not list is damage, for whoever loads the state reads
    all that is there; elsewhere it is left alone. Links and devices are damage anywhere.

    Args:
        folder: of the checkpoint.
        checksums: read every file; without, only names and sizes are compared.
        watch: told how far the reading is, by the thread that calls this.

    Raises:
        DamagedCheckpoint: the first file at fault.
    """
    manifest = manifests.read(folder)
    _check_step(folder, manifest)
    for name in sorted(manifest.files):
        _check_size(folder, name, manifest.files[name])
    _check_unlisted(folder, manifest)
    if checksums:
        _check_content(folder, manifest, watch)
    return manifest


def _check_step(folder: Path, manifest: Manifest) -> None:
    promised = promised_step(folder.name)
    if promised is not None and promised != manifest.step:
        reason = f"is of step {manifest.step}, the folder's name says {promised}"
        raise DamagedCheckpoint(folder, MANIFEST, reason)


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    facts = _lstat(folder, name)
    if facts is None:
        reason = f"is missing, the manifest says {record.size:,} bytes"
    elif stat.S_ISLNK(facts.st_mode):
        reason = "is, or lies behind, a symbolic link; expected a file in the folder itself"
    elif not stat.S_ISREG(facts.st_mode):
        reason = "is not a regular file"
    elif facts.st_size != record.size:
        reason = f"has {facts.st_size:,} bytes, the manifest says {record.size:,}"
    else:
        return
    raise DamagedCheckpoint(folder, name, reason)


def _lstat(folder: Path, name: str) -> os.stat_result | None:
    """What is at a path of the manifest, or the first link on the way to it."""
    path, facts = folder, None
    for part in PurePosixPath(name).parts:
        path /= part
        try:
            facts = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DamagedCheckpoint(folder, name, f"cannot be read: {error.strerror}") from error
        if stat.S_ISLNK(facts.st_mode):
            return facts
    return facts


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    top = folder / STATE
    if top.is_symlink():
        raise DamagedCheckpoint(folder, STATE, "is a symbolic link, expected a folder")
    for at, folders, files in os.walk(top):
        links = [name for name in folders if Path(at, name).is_symlink()]
        for name in sorted(files + links):
            relative = Path(at, name).relative_to(folder).as_posix()
            if relative not in manifest.files:
                shown = relative if relative.isprintable() else ascii(relative)
                raise DamagedCheckpoint(folder, shown, "is not in the manifest")


class _Stopped(Exception):
    """Nobody waits for the reader any more."""


class _Readers:
    """What the readers of a checkpoint's files share."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._are_stopped = False

    def note(self, count: int) -> None:
        """Count a block; ends its reader if all are to stop."""
        if self._are_stopped:
            raise _Stopped
        with self._lock:
            self.bytes_read += count

    def stop(self) -> None:
        """Have every reader end after its block."""
        self._are_stopped = True


def _check_content(folder: Path, manifest: Manifest, watch: Watch) -> None:
    """Read and hash the files in threads; an exception that comes meanwhile ends these, too."""
    readers, names = _Readers(), sorted(manifest.files)
    size = sum(record.size for record in manifest.files.values())
    pool = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1))
    try:
        for check in [pool.submit(_check, folder, name, manifest, readers) for name in names]:
            watch(folder, readers.bytes_read, size)
            while wait([check], _LOOK_S).not_done:
                watch(folder, readers.bytes_read, size)
            check.result()
    finally:
        readers.stop()
        pool.shutdown(cancel_futures=True)


def _check(folder: Path, name: str, manifest: Manifest, readers: _Readers) -> None:
    expected = manifest.files[name].sha256
    try:
        found = digest(folder / name, readers.note).sha256
    except OSError as error:
        raise DamagedCheckpoint(folder, name, f"cannot be read: {error.strerror}") from error
    if found != expected:
        reason = f"has the sha256 {found}, the manifest says {expected}"
        raise DamagedCheckpoint(folder, name, reason)
