"""Finding the checkpoint to take up: the newest that is whole, or the one that a path names."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybridrl.checkpoint import latest, verification
from hybridrl.checkpoint.durable import exists
from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.leftovers import hidden_steps_in, steps_in
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.names import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    REPLACED,
    STATE,
    checkpoints_folder,
    hidden_name,
    promised_step,
    step_name,
)
from hybridrl.checkpoint.verification import Confirm, Watch, unconfirmed, unwatched
from hybridrl.config.errors import ConfigError


@dataclass(frozen=True)
class Found:
    """A checkpoint to take up.

    Attributes:
        folder: where it is.
        manifest: what is in it.
        damaged: newer ones that were passed over, newest first.
    """

    folder: Path
    manifest: Manifest
    damaged: tuple[DamagedCheckpoint, ...] = ()


class NoWholeCheckpoint(ConfigError):
    """There are checkpoints, and every one is damaged."""

    subject = "with the run's checkpoints; none is whole. resume=none starts anew"


class UnreadableCheckpoint(ConfigError):
    """The disk fails where checkpoints are: which of them are whole is not known."""

    subject = "with reading checkpoints; all are as they were"


@contextmanager
def as_unreadable() -> Iterator[None]:
    """Tell what a disk refuses to the user, who can do something about it.

    Raises:
        UnreadableCheckpoint: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        number = errno.errorcode.get(error.errno or 0, error.errno)
        raise UnreadableCheckpoint(
            f"{error.filename} cannot be read: {error.strerror} ({number}). It may be whole, so it "
            f"is not taken for damaged and passed over.\n"
            f"See to the disk, the mount or the permissions and give the same command again, or "
            f"name a checkpoint that can be read."
        ) from error


def newest_good(
    run_dir: Path,
    *,
    verify: bool = True,
    watch: Watch = unwatched,
    confirm: Confirm = unconfirmed,
) -> Found | None:
    """The newest checkpoint of a run that is whole, by step; None if the run has none at all.

    Decided from what is on disk; `latest`, which a kill can leave behind, is not asked. Nothing is
    written, so a run may be looked at while it trains.

    Args:
        run_dir: the run's directory.
        verify: compare checksums, too, not only names and sizes.
        watch: told how far that is; what it raises ends it.
        confirm: reads files elsewhere.

    Raises:
        NoWholeCheckpoint: there are some, and all are damaged; it names each.
        UnreadableCheckpoint: the disk fails, for seconds.
    """
    with as_unreadable():
        return _newest_in(checkpoints_folder(run_dir), _Verify(verify, watch, confirm))


def named(
    path: Path,
    *,
    key: str = "resume",
    verify: bool = True,
    watch: Watch = unwatched,
    confirm: Confirm = unconfirmed,
) -> Found:
    """The checkpoint that a user's path means.

    Args:
        path: a checkpoint's folder; or a run's directory, or its checkpoints folder, for the newest
            one that is whole; or its file `latest`, for the one that is named there.
        key: the setting that has the path, for the texts.
        verify, watch, confirm: as for `newest_good`.

    Raises:
        ConfigError: there is no checkpoint there, or the one that was named is damaged, or the
            disk fails, for seconds.
    """
    with as_unreadable():
        return _named(path.expanduser(), key, _Verify(verify, watch, confirm))


class _Verify(NamedTuple):
    """How checkpoints are verified; see `verification.verify`."""

    checksums: bool
    watch: Watch
    confirm: Confirm

    def __call__(self, folder: Path) -> Manifest:
        return verification.verify(
            folder, checksums=self.checksums, watch=self.watch, confirm=self.confirm
        )


def _named(path: Path, key: str, verify: _Verify) -> Found:
    if path.name == LATEST and path.is_file():
        return _explicit(_of_latest(path, key), key, verify)
    if not path.is_dir():
        what = "is a file, not a folder" if path.is_file() else "does not exist"
        raise _no_checkpoint(key, path, what)
    if _is_checkpoint(path):
        return _explicit(path, key, verify)
    for folder in (checkpoints_folder(path), path):
        found = _newest_in(folder, verify)
        if found is not None:
            return found
    where = f"{CHECKPOINTS}/ in it" if checkpoints_folder(path).is_dir() else "it"
    raise _no_checkpoint(key, path, f"is a folder, and {where} has no {step_name(0)[:-8]}...")


def _newest_in(folder: Path, verify: _Verify) -> Found | None:
    damaged: list[DamagedCheckpoint] = []
    for candidate in _candidates(folder):
        try:
            manifest = verify(candidate)
        except DamagedCheckpoint as error:
            damaged.append(error)
        else:
            return Found(candidate, manifest, tuple(damaged))
    if damaged:
        raise NoWholeCheckpoint(*map(str, damaged))
    return None


def _candidates(folder: Path) -> list[Path]:
    """Newest first; one that was set aside for its successor comes right after it."""
    whole = {(step, 1): step_name(step) for step in steps_in(folder)}
    aside = {(step, 0): hidden_name(step, REPLACED) for step in hidden_steps_in(folder, REPLACED)}
    return [folder / name for _, name in sorted((whole | aside).items(), reverse=True)]


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is meant to be a checkpoint; a run's directory has a manifest, too."""
    if promised_step(path.resolve().name) is not None:
        return True
    return exists(path / MANIFEST) and exists(path / STATE)


def _explicit(folder: Path, key: str, verify: _Verify) -> Found:
    try:
        return Found(folder, verify(folder))
    except DamagedCheckpoint as error:
        raise ConfigError(
            f"{key} = {folder}: this checkpoint is damaged: {error.file} {error.reason}.\n"
            f"Name another one, or the run's directory for the newest that is whole."
        ) from error


def _of_latest(path: Path, key: str) -> Path:
    step = latest.named_step(path.parent)
    folder = path.parent / step_name(step) if step is not None else None
    if folder is None or not folder.is_dir():
        what = f"names {folder.name}, which is not there" if folder else "names no checkpoint"
        raise _no_checkpoint(key, path, what)
    return folder


def _no_checkpoint(key: str, path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{key} = {path}: this {what} (seen from {Path.cwd()}).\n"
        f"Expected a checkpoint, as in {key}=<run>/{CHECKPOINTS}/{step_name(20)}, or a run's "
        f"directory for its newest one, {key}=<run>."
    )
