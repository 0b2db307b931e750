"""Verification of checkpoints against their manifests: sizes first, then checksums."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import names_in, retried
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest
from hybridrl.checkpoint.names import MANIFEST, STATE, promised_step

# Hashing needs a core per file; few readers saturate a disk.
_READERS = 8
_BLOCK = 2**20  # bytes
# Seconds between two progress updates.
_LOOK_S = 0.2

# Progress callback: (checkpoint's folder, bytes read, bytes in all), several times a second. An
# exception from it ends the verification.
Watch = Callable[[Path, int, int], None]


# Remote verification: (checkpoint's folder, its files, watch) -> names of the files that other
# nodes found intact. The rest is read here.
Confirm = Callable[[Path, Mapping[str, FileRecord], Watch], set[str]]


def unconfirmed(folder: Path, files: Mapping[str, FileRecord], watch: Watch) -> set[str]:
    """Confirm no file: all are read here."""
    return set()


def unwatched(folder: Path, read: int, size: int) -> None:
    """Ignore progress."""


def digest(path: Path, note: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Compute size and SHA-256 of a file.

    Args:
        path: of the file.
        note: called with the size of each block read; an exception from it ends the reading.

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


def digests(folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Hash files in several threads; unreadable ones are left out.

    Args:
        folder: of the checkpoint.
        names: of files in it.
    """

    def record(name: str) -> FileRecord | None:
        try:
            return digest(folder / name)
        except OSError:
            return None

    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        found = zip(names, pool.map(record, names), strict=True)
        return {name: one for name, one in found if one is not None}


def verify(
    folder: Path,
    *,
    checksums: bool = True,
    watch: Watch = unwatched,
    confirm: Confirm = unconfirmed,
) -> Manifest:
    """Verify a checkpoint; return its manifest.

    An unlisted file in state/ is damage, because loading reads all files there. Links and devices
    are damage anywhere.

    Args:
        folder: of the checkpoint.
        checksums: read every file; else only names and sizes are compared.
        watch: progress callback, called from this thread.
        confirm: verifies files on other nodes.

    Raises:
        DamagedCheckpoint: the first damaged file.
        UnreadableFile: a file cannot be read, so it is unknown if the checkpoint is intact.
    """
    manifest = manifests.read(folder)
    _check_step(folder, manifest)
    for name in sorted(manifest.files):
        _check_size(folder, name, manifest.files[name])
    _check_unlisted(folder, manifest)
    if checksums:
        _check_content(folder, manifest, watch, confirm(folder, manifest.files, watch))
    return manifest


def _check_step(folder: Path, manifest: Manifest) -> None:
    promised = promised_step(folder.name)
    if promised is not None and promised != manifest.step:
        reason = f"is of step {manifest.step}, the folder's name says {promised}"
        raise DamagedCheckpoint(folder, MANIFEST, reason)


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    facts = _lstat(folder, name)
    if facts is None:
        raise _missing(folder, name, record)
    if stat.S_ISLNK(facts.st_mode):
        reason = "is, or lies behind, a symbolic link; expected a file in the folder itself"
    elif not stat.S_ISREG(facts.st_mode):
        reason = "is not a regular file"
    elif facts.st_size != record.size:
        reason = f"has {facts.st_size:,} bytes, the manifest says {record.size:,}"
    else:
        return
    raise DamagedCheckpoint(folder, name, reason)


def _missing(folder: Path, name: str, record: FileRecord) -> DamagedCheckpoint:
    return DamagedCheckpoint(folder, name, f"is missing, the manifest says {record.size:,} bytes")


def _lstat(folder: Path, name: str) -> os.stat_result | None:
    """Stat a path in the folder, or the first link on the way to it."""
    path, facts = folder, None
    for part in PurePosixPath(name).parts:
        path /= part
        try:
            facts = retried(os.lstat, path)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(facts.st_mode):
            return facts
    return facts


def _check_unlisted(folder: Path, manifest: Manifest) -> None:
    top = _lstat(folder, STATE)
    if top is not None and stat.S_ISLNK(top.st_mode):
        raise DamagedCheckpoint(folder, STATE, "is a symbolic link, expected a folder")
    folders = [STATE]
    while folders:
        inside = folders.pop()
        for name in sorted(names_in(folder / inside)):
            relative = f"{inside}/{name}"
            facts = None if relative in manifest.files else _lstat(folder, relative)
            if facts is not None and stat.S_ISDIR(facts.st_mode):
                folders.append(relative)
            elif facts is not None:
                shown = relative if relative.isprintable() else ascii(relative)
                raise DamagedCheckpoint(folder, shown, "is not in the manifest")


class _Stopped(Exception):
    """The reader was stopped."""


class _Readers:
    """Shared state of the reader threads: bytes read, and a stop flag."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def digest(self, path: Path) -> FileRecord:
        """Compute size and SHA-256 of a file; after a failure its bytes do not count."""
        read = 0

        def note(count: int) -> None:
            nonlocal read
            if self._stopped.is_set():
                raise _Stopped
            read += count
            self._count(count)

        try:
            return digest(path, note)
        except OSError:
            self._count(-read)
            raise

    def wait(self, seconds: float) -> None:
        """Wait, or raise if the readers were stopped."""
        if self._stopped.wait(seconds):
            raise _Stopped

    def stop(self) -> None:
        """Stop every reader after its current block."""
        self._stopped.set()

    def _count(self, count: int) -> None:
        with self._lock:
            self.bytes_read += count


def _check_content(folder: Path, manifest: Manifest, watch: Watch, confirmed: set[str]) -> None:
    """Read and hash the unconfirmed files in threads; an exception stops them.

    A file that is damaged on another node is read here, because that node may see another disk.
    """
    readers, names = _Readers(), sorted(manifest.files.keys() - confirmed)
    readers.bytes_read = sum(manifest.files[name].size for name in confirmed)
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
    expected = manifest.files[name]
    try:
        found = retried(readers.digest, folder / name, readers.wait)
    except FileNotFoundError as error:
        raise _missing(folder, name, expected) from error
    if found.sha256 != expected.sha256:
        reason = f"has the sha256 {found.sha256}, the manifest says {expected.sha256}"
        raise DamagedCheckpoint(folder, name, reason)
