"""Verification of checkpoints against their manifests: sizes first, then checksums."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import MANIFEST, STATE, names_in, promised_step, retried
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest

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
# `verify`, with its options set.
Verify = Callable[[Path], Manifest]


def digest(path: Path, note: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Compute size and SHA-256 of a file; `note` is called with the size of each block read."""
    content, size, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            content.update(block[:count])
            size += count
            note(count)
    return FileRecord(size, content.hexdigest())


def digests(folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Hash files of a checkpoint in several threads; unreadable ones are left out."""

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
    watch: Watch = lambda *_: None,
    confirm: Confirm = lambda *_: set(),
) -> Manifest:
    """Verify a checkpoint; return its manifest.

    An unlisted file in state/ is damage, because loading reads all files there. Links and devices
    are damage anywhere.

    Without `checksums` only names and sizes are compared. `watch` is called from this thread;
    `confirm` verifies files on other nodes.

    Raises:
        DamagedCheckpoint: the first damaged file.
        UnreadableFile: a file cannot be read, so it is unknown if the checkpoint is intact.
    """
    manifest = manifests.read(folder)
    for file, reason in _differences(folder, manifest):
        raise DamagedCheckpoint(folder, file, reason)
    if checksums:
        _check_content(folder, manifest, watch, confirm(folder, manifest.files, watch))
    return manifest


def _differences(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield damaged files and reasons, by names and sizes alone."""
    promised = promised_step(folder.name)
    if promised not in (None, manifest.step):
        yield MANIFEST, f"is of step {manifest.step}, the folder's name says {promised}"
    for name, record in sorted(manifest.files.items()):
        facts = _lstat(folder, name)
        if facts is None:
            yield name, _missing(record)
        elif stat.S_ISLNK(facts.st_mode):
            yield name, "is, or lies behind, a symbolic link; expected a file in the folder itself"
        elif not stat.S_ISREG(facts.st_mode):
            yield name, "is not a regular file"
        elif facts.st_size != record.size:
            yield name, f"has {facts.st_size:,} bytes, the manifest says {record.size:,}"
    top = _lstat(folder, STATE)
    if top is not None and stat.S_ISLNK(top.st_mode):
        yield STATE, "is a symbolic link, expected a folder"
    folders = [STATE]
    while folders:
        inside = folders.pop()
        for name in sorted(names_in(folder / inside)):
            relative = f"{inside}/{name}"
            facts = None if relative in manifest.files else _lstat(folder, relative)
            if facts is not None and stat.S_ISDIR(facts.st_mode):
                folders.append(relative)
            elif facts is not None:
                yield (
                    relative if relative.isprintable() else ascii(relative),
                    "is not in the manifest",
                )


def _missing(record: FileRecord) -> str:
    return f"is missing, the manifest says {record.size:,} bytes"


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


def _check_content(folder: Path, manifest: Manifest, watch: Watch, confirmed: set[str]) -> None:
    """Read and hash the unconfirmed files in threads; an exception stops them.

    A file that is damaged on another node is read here, because that node may see another disk.
    """
    files, stopped = manifest.files, threading.Event()
    size = sum(record.size for record in files.values())
    # Bytes read of each file.
    read = {name: record.size if name in confirmed else 0 for name, record in files.items()}

    def check(name: str) -> None:
        def attempt(path: Path) -> FileRecord:
            read[name] = 0
            return digest(path, note)

        def note(count: int) -> None:
            pause(0)
            read[name] += count

        def pause(seconds: float) -> None:
            if stopped.wait(seconds):
                raise CancelledError

        try:
            found = retried(attempt, folder / name, pause)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(folder, name, _missing(files[name])) from error
        if found.sha256 != files[name].sha256:
            reason = f"has the sha256 {found.sha256}, the manifest says {files[name].sha256}"
            raise DamagedCheckpoint(folder, name, reason)

    pool = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1))
    try:
        for checking in [pool.submit(check, name) for name in sorted(files.keys() - confirmed)]:
            watch(folder, sum(read.values()), size)
            while wait([checking], _LOOK_S).not_done:
                watch(folder, sum(read.values()), size)
            checking.result()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
