"""Names of checkpoints' files and folders; durable writes, removal, and reads with retries.

<run>/checkpoints/step_00000020/             a complete checkpoint
<run>/checkpoints/.step_00000040.partial/    being written, or left by a crash
<run>/checkpoints/.step_00000010.removed/    being deleted
<run>/checkpoints/damaged_step_00000060/     quarantined: resume=auto does not use it
<run>/checkpoints/superseded_step_00000060/  quarantined: later than the step resumed from

A failed read is no damage: the file may be intact behind a network that fails for a moment.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CHECKPOINTS = "checkpoints"

MANIFEST = "manifest.json"
DRIVER = "driver.json"
STATE = "state"

PARTIAL = ".partial"
REMOVED = ".removed"

DAMAGED = "damaged_"
SUPERSEDED = "superseded_"

_STEP = "step_([0-9]{8}|[1-9][0-9]{8,17})"
_HIDDEN = rf"\.{_STEP}(?:{re.escape(PARTIAL)}|{re.escape(REMOVED)})"
_ANY = re.compile(f"(?:{DAMAGED}|{SUPERSEDED})?{_STEP}|{_HIDDEN}")

# Seconds between the attempts to read something.
PAUSES_S = (0.2, 1.0, 3.0)
# Errors of names that do not exist, or cannot.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}

_T = TypeVar("_T")


class UnreadableFile(OSError):
    """A file or folder that could not be read in any attempt; `filename` is its path."""


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync a file; the caller syncs its folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Fsync a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Fsync the names in a folder."""
    try:
        sync_file(path)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_tree(folder: Path) -> None:
    """Fsync all files below a folder, then the folders that name them, the innermost first."""
    tree = list(os.walk(folder, topdown=False))
    for inside, _, names in tree:
        for name in names:
            sync_file(Path(inside, name))
    for inside, _, _ in tree:
        sync_folder(Path(inside))


def exists(path: Path) -> bool:
    """Return true if the name exists, also as a dangling link."""
    return os.path.lexists(path)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link, if it exists.

    Other processes may remove the same path concurrently.
    """
    while exists(path):
        try:
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
        except FileNotFoundError:  # removed by another process
            continue


def put_in_place(new: Path, final: Path, aside: Path) -> None:
    """Rename a new folder to its final name; an existing folder is renamed to `aside` first.

    Raises:
        OSError: a rename failed; the old folder has its name.
    """
    replaces = exists(final)
    if replaces:
        os.rename(final, aside)
    try:
        os.rename(new, final)
    except OSError:
        if replaces:
            os.rename(aside, final)
        raise


def retried(
    read: Callable[[Path], _T], path: Path, wait: Callable[[float], None] = time.sleep
) -> _T:
    """Return `read(path)`, retried for some seconds after an OSError.

    An exception from `wait`, called between the attempts with the seconds to wait, ends them.

    Raises:
        FileNotFoundError: the name does not exist.
        UnreadableFile: each attempt failed; with the last error's number and text.
    """
    pauses = iter(PAUSES_S)
    while True:
        try:
            return read(path)
        except OSError as error:
            details = (error.errno, error.strerror, str(path))
            if error.errno in _ABSENT:
                raise FileNotFoundError(*details) from error
            pause = next(pauses, None)
            if pause is None:
                raise UnreadableFile(*details) from error
        wait(pause)


def names_in(folder: Path) -> list[str]:
    """List a folder, with retries; empty if it does not exist."""
    try:
        return retried(os.listdir, folder)
    except FileNotFoundError:
        return []


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_dir / CHECKPOINTS


def is_of_run(checkpoint: Path, run_dir: Path) -> bool:
    """Return whether a checkpoint is one of this run's own, not another run's."""
    return checkpoint.resolve().parent == checkpoints_folder(run_dir).resolve()


def step_name(step: int) -> str:
    """Return the name of a complete checkpoint; names sort as steps do."""
    assert 0 <= step < 10**18, f"no step has the number {step}"
    return f"step_{step:08d}"


def hidden_name(step: int, suffix: str) -> str:
    """Return the name of a checkpoint in transition: PARTIAL or REMOVED."""
    return f".{step_name(step)}{suffix}"


def step_of(name: str) -> int | None:
    """Parse the name of a complete checkpoint; None for any other name."""
    match = re.fullmatch(_STEP, name)
    return int(match[1]) if match else None


def promised_step(name: str) -> int | None:
    """Parse the name of a checkpoint, also in transition or quarantine; None for any other name."""
    match = _ANY.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def steps_in(folder: Path) -> list[int]:
    """List the steps of complete checkpoints, ascending; empty if the folder does not exist."""
    return sorted(s for s in map(step_of, names_in(folder)) if s is not None)


def hidden_in(folder: Path, suffix: str) -> list[Path]:
    """List the checkpoints in transition with this suffix."""
    return [
        folder / name
        for name in names_in(folder)
        if name.endswith(suffix) and promised_step(name) is not None
    ]
