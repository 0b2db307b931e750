"""Verification of checkpoints against their manifests, and search for the newest intact one.

Sizes are compared first, then checksums.
"""

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    checkpoints_folder,
    exists,
    names_in,
    promised_step,
    retried,
    step_name,
    steps_in,
)
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest
from hybridrl.config.errors import ConfigError

# Hashing needs a core per file; few readers saturate a disk.
_READERS = 8
_BLOCK = 2**20  # bytes
# Seconds between two progress updates.
_LOOK_S = 0.2

# Progress callback: (checkpoint's folder, bytes read, bytes in all). An exception ends the
# verification.
Watch = Callable[[Path, int, int], None]
# Remote verification: (checkpoint's folder, its files, watch) -> names of the files that are intact
# on other nodes. The rest is read here.
Confirm = Callable[[Path, Mapping[str, FileRecord], Watch], set[str]]
# `verify`, with its options set.
Verify = Callable[[Path], Manifest]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Intact checkpoint; `damaged` are newer ones that were skipped, newest first."""

    folder: Path
    manifest: Manifest
    damaged: tuple[DamagedCheckpoint, ...] = ()


class NoWholeCheckpoint(ConfigError):
    """All checkpoints of a run are damaged."""

    subject = "with the run's checkpoints; none is whole. A new run needs another directory"


class UnreadableCheckpoint(ConfigError):
    """Checkpoints cannot be read, so it is unknown which are intact."""

    subject = "with reading checkpoints; all are as they were"


@contextmanager
def as_unreadable() -> Iterator[None]:
    """Convert an OSError of the block to UnreadableCheckpoint."""
    try:
        yield
    except OSError as error:
        number = errno.errorcode.get(error.errno or 0, error.errno)
        raise UnreadableCheckpoint(
            f"{error.filename} cannot be read: {error.strerror} ({number}). It may be intact, so "
            f"it is not skipped as damaged.\n"
            f"Check the disk, the mount and the permissions and run the same command again, or "
            f"name a readable checkpoint."
        ) from error


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
        records = zip(names, pool.map(record, names), strict=True)
        return {name: one for name, one in records if one is not None}


def verify(
    folder: Path,
    *,
    checksums: bool = True,
    watch: Watch = lambda *_: None,
    confirm: Confirm = lambda *_: set(),
) -> Manifest:
    """Verify a checkpoint; return its manifest.

    An unlisted file in state/ is damage, because loading reads all files there. Links and devices
    are damage anywhere. Without `checksums` only names and sizes are compared.

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
                printable = relative if relative.isprintable() else ascii(relative)
                yield printable, "is not in the manifest"


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
            content = retried(attempt, folder / name, pause)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(folder, name, _missing(files[name])) from error
        if content.sha256 != files[name].sha256:
            reason = f"has the sha256 {content.sha256}, the manifest says {files[name].sha256}"
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


@as_unreadable()
def newest_good(run_dir: Path, verify: Verify = verify) -> VerifiedCheckpoint | None:
    """Find the newest intact checkpoint of a run, by step; None if the run has no checkpoint.

    Nothing is written, so the run may still be training.

    Raises:
        NoWholeCheckpoint: all are damaged; each is named.
        UnreadableCheckpoint: a file cannot be read.
    """
    return _newest_in(checkpoints_folder(run_dir), verify)


@as_unreadable()
def named(path: Path, *, key: str = "resume", verify: Verify = verify) -> VerifiedCheckpoint:
    """Find the checkpoint at a user's path.

    `path` is a checkpoint's folder; or a run's directory, or its checkpoints folder, for the newest
    intact one. `key` is the setting that holds it, for messages.

    Raises:
        ConfigError: there is no checkpoint, the named one is damaged, or a file cannot be read.
    """
    path = path.expanduser()
    if not path.is_dir():
        what = "is a file, not a folder" if path.is_file() else "does not exist"
        raise _no_checkpoint(key, path, what)
    if _is_checkpoint(path):
        try:
            return VerifiedCheckpoint(path, verify(path))
        except DamagedCheckpoint as error:
            raise ConfigError(
                f"{key} = {path}: this checkpoint is damaged: {error.file} {error.reason}.\n"
                f"Name another one, or the run's directory for the newest that is whole."
            ) from error
    newest = _newest_in(checkpoints_folder(path), verify) or _newest_in(path, verify)
    if newest is None:
        where = f"{CHECKPOINTS}/ in it" if checkpoints_folder(path).is_dir() else "it"
        raise _no_checkpoint(key, path, f"is a folder, and {where} has no {step_name(0)[:-8]}...")
    return newest


def _newest_in(folder: Path, verify: Verify) -> VerifiedCheckpoint | None:
    damaged: list[DamagedCheckpoint] = []
    for step in reversed(steps_in(folder)):
        candidate = folder / step_name(step)
        try:
            manifest = verify(candidate)
        except DamagedCheckpoint as error:
            damaged.append(error)
        else:
            return VerifiedCheckpoint(candidate, manifest, tuple(damaged))
    if damaged:
        raise NoWholeCheckpoint(*map(str, damaged))
    return None


def _is_checkpoint(path: Path) -> bool:
    """Return true for a checkpoint's folder; a run's directory has a manifest, too."""
    if promised_step(path.resolve().name) is not None:
        return True
    return exists(path / MANIFEST) and exists(path / STATE)


def _no_checkpoint(key: str, path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{key} = {path}: this {what} (seen from {Path.cwd()}).\n"
        f"Expected a checkpoint, as in {key}=<run>/{CHECKPOINTS}/{step_name(20)}, or a run's "
        f"directory for its newest one, {key}=<run>."
    )
