"""Search for the checkpoint to use: the newest intact one, or the one at a path."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint import verification
from hybridrl.checkpoint.files import (
    CHECKPOINTS,
    MANIFEST,
    STATE,
    checkpoints_folder,
    exists,
    promised_step,
    step_name,
    steps_in,
)
from hybridrl.checkpoint.manifest import DamagedCheckpoint, Manifest
from hybridrl.checkpoint.verification import Verify
from hybridrl.config.errors import ConfigError


@dataclass(frozen=True)
class Found:
    """Checkpoint that was found; `damaged` are newer ones that were skipped, newest first."""

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


@as_unreadable()
def newest_good(run_dir: Path, verify: Verify = verification.verify) -> Found | None:
    """Find the newest intact checkpoint of a run, by step; None if the run has no checkpoint.

    Nothing is written, so the run may still be training.

    Raises:
        NoWholeCheckpoint: all are damaged; each is named.
        UnreadableCheckpoint: a file cannot be read.
    """
    return _newest_in(checkpoints_folder(run_dir), verify)


@as_unreadable()
def named(path: Path, *, key: str = "resume", verify: Verify = verification.verify) -> Found:
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
            return Found(path, verify(path))
        except DamagedCheckpoint as error:
            raise ConfigError(
                f"{key} = {path}: this checkpoint is damaged: {error.file} {error.reason}.\n"
                f"Name another one, or the run's directory for the newest that is whole."
            ) from error
    found = _newest_in(checkpoints_folder(path), verify) or _newest_in(path, verify)
    if found is None:
        where = f"{CHECKPOINTS}/ in it" if checkpoints_folder(path).is_dir() else "it"
        raise _no_checkpoint(key, path, f"is a folder, and {where} has no {step_name(0)[:-8]}...")
    return found


def _newest_in(folder: Path, verify: Verify) -> Found | None:
    damaged: list[DamagedCheckpoint] = []
    for step in reversed(steps_in(folder)):
        candidate = folder / step_name(step)
        try:
            manifest = verify(candidate)
        except DamagedCheckpoint as error:
            damaged.append(error)
        else:
            return Found(candidate, manifest, tuple(damaged))
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
