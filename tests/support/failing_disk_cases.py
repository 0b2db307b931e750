"""Checkpoints on a disk that fails; run in a mount namespace of its own.

A process's memory at address 0 is a file of 0 bytes whose content cannot be read: EIO.
"""

import dataclasses
import itertools
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hybridrl.checkpoint import files
from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.commit import quarantine
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.verification import (
    UnreadableCheckpoint,
    digest,
    named,
    newest_good,
    verify,
)
from tests.support.checkpoint_cases import pruned, save

EMPTY = "notes.txt"  # a file that each checkpoint of these has and lists
NOBODY = 65534


def unreadable_files(disk: Path) -> dict[str, list[str]]:
    """What each way to look for a checkpoint says when a file of the newest cannot be read.

    Args:
        disk: an empty file system.

    Returns:
        By file and way; each way must have left all names as they were.
    """
    files.PAUSES_S = (0.01, 0.01)
    newest = _two_checkpoints(disk)
    ways: dict[str, Callable[[], object]] = {
        "auto": lambda: newest_good(disk),
        "run": lambda: named(disk),
        "path": lambda: named(newest),
    }
    told = {}
    for file in ("manifest.json", EMPTY):
        _break(newest / file)
        told[file] = [_told(way, disk) for way in ways.values()]
        _mend(newest / file)
    assert newest_good(disk).folder == newest
    return told


def unreadable_folders() -> dict[str, str]:
    """What is said of folders that this user may not read: the state, and all checkpoints.

    The working directory is an empty file system: nobody but root gets to its path.
    """
    files.PAUSES_S = (0.01, 0.01)
    disk = Path()
    newest = _two_checkpoints(disk)
    told = {}
    for folder in (newest / "state", newest.parent):
        folder.chmod(0)
        os.seteuid(NOBODY)
        told[str(folder)] = _refused(lambda: newest_good(disk))
        os.seteuid(0)
        folder.chmod(0o755)
    assert newest_good(disk).folder == newest
    return told


def mended_meanwhile(disk: Path) -> tuple[str, list[Path]]:
    """A file can be read again while its reader waits: what is found then, and set aside."""
    files.PAUSES_S = (0.5, 60.0)
    newest, looks = _two_checkpoints(disk), itertools.count(1)
    _break(newest / EMPTY)

    def watch(folder: Path, count: int, size: int) -> None:
        if next(looks) == 2:
            _mend(newest / EMPTY)

    found = newest_good(disk, partial(verify, watch=watch))
    assert found is not None
    return found.folder.name, quarantine(disk, found)


def left_by_pruning(disk: Path) -> list[str]:
    """What stays of three checkpoints, of which one is to stay, while the newest is unreadable."""
    files.PAUSES_S = (0.01, 0.01)
    save(disk, 5)
    newest = _two_checkpoints(disk)
    _break(newest / "manifest.json")
    pruned(disk, keep_last=1)
    return sorted(path.name for path in newest.parent.iterdir())


def _two_checkpoints(disk: Path) -> Path:
    """Checkpoints of steps 10 and 20, the newer one with an empty file; returns that."""
    save(disk, 10)
    newest = save(disk, 20)
    (newest / EMPTY).touch()
    manifest: Manifest = manifests.read(newest)
    files = manifest.files | {EMPTY: digest(newest / EMPTY)}
    manifests.write(newest, dataclasses.replace(manifest, files=files))
    verify(newest)
    return newest


def _told(look: Callable[[], object], disk: Path) -> str:
    before = sorted(disk.rglob("*"))
    told = _refused(look)
    assert sorted(disk.rglob("*")) == before
    return told


def _refused(look: Callable[[], object]) -> str:
    try:
        look()
    except UnreadableCheckpoint as error:
        return str(error)
    raise AssertionError("not refused")


def _break(file: Path) -> None:
    subprocess.run(["mount", "--bind", f"/proc/{os.getpid()}/mem", str(file)], check=True)


def _mend(file: Path) -> None:
    # A reader may have the file open just now.
    subprocess.run(["umount", "--lazy", str(file)], check=True)
