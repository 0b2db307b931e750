"""Writing that a power cut does not undo, and removing."""

import errno
import os
import shutil
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it; its folder is to be synced by the caller.

    Raises:
        OSError: the disk is full, read-only or broken.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has a file's content.

    Raises:
        OSError: the disk does not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the disk has a folder's names.

    Raises:
        OSError: the disk does not take them.
    """
    try:
        sync_file(path)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def exists(path: Path) -> bool:
    """Whether there is anything of this name, a dangling link included."""
    return os.path.lexists(path)


def remove(path: Path) -> None:
    """Remove a folder with all in it, a file or a link itself; nothing if there is none.

    Others may be removing the same.

    Raises:
        OSError: something in it cannot be removed.
    """
    while exists(path):
        try:
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
        except FileNotFoundError:  # another one was faster
            continue


def put_in_place(new: Path, final: Path, aside: Path) -> None:
    """Rename a new folder to its final name, after the one that has it, if there is one.

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
