"""Saves on a file system that is nearly full or read-only; run in a mount namespace of its own."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.files import PARTIAL, hidden_name
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import newest_good
from tests.support.checkpoint_cases import pruned, save

PAGE = 4096


class Outcome(NamedTuple):
    """A save that failed, and what is on the disk after it."""

    phase: str
    error: int
    newest: int
    generation: float
    damaged: tuple[DamagedCheckpoint, ...]
    has_remains: bool


def with_room_for(disk: Path, kind: str) -> list[Outcome]:
    """Save step 30 with room for no page (or inode), then for one more until it succeeds.

    Args:
        disk: an empty file system, small.
        kind: of which there is little, pages or inodes.
    """
    run_dir = disk / "run"
    run_dir.mkdir()
    for old in (10, 20):
        save(run_dir, old, generation=1)
    outcomes = []
    for room in range(100):
        phases: list[str] = []
        with _filled(disk, room, kind):
            try:
                save(run_dir, 30, phases, generation=2)
            except OSError as error:
                outcomes.append(_outcome(run_dir, phases[-1], error))
            else:
                return outcomes
    raise AssertionError("no save succeeded")


def on_read_only(disk: Path) -> dict[str, int]:
    """What each call fails with once the disk is read-only; what was saved is still found."""
    for step in (10, 20):
        save(disk, step)
    partial = commit.begin(disk, 30)
    shutil.copytree(disk / "checkpoints" / "step_00000020", partial, dirs_exist_ok=True)
    found = newest_good(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    calls = {
        "begin": lambda: commit.begin(disk, 40),
        "commit": lambda: commit.commit(partial, found.manifest),
        "prune": lambda: pruned(disk, keep_last=1),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            errors[name] = error.errno
    commit.abandon(partial)
    assert newest_good(disk) == found
    return errors


def rename_refused(run_dir: Path) -> tuple[int, list[str]]:
    """Save with a folder that cannot be renamed: the error, and all names after it."""
    save(run_dir, 20)
    partial = commit.begin(run_dir, 30)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(partial)], check=True)
    first = partial.with_name("step_00000020")
    shutil.copytree(first, partial, dirs_exist_ok=True)
    found = newest_good(run_dir)
    try:
        commit.commit(partial, replace(found.manifest, step=30))
    except OSError as error:
        assert newest_good(run_dir) == found
        return error.errno, sorted(os.listdir(partial.parent))
    raise AssertionError("a mount point was renamed")


def _outcome(run_dir: Path, phase: str, error: OSError) -> Outcome:
    assert error.errno == errno.ENOSPC, error
    partial = run_dir / "checkpoints" / hidden_name(30, PARTIAL)
    commit.abandon(partial)
    found = newest_good(run_dir)
    return Outcome(
        phase,
        error.errno,
        found.manifest.step,
        found.manifest.metrics["generation"],
        found.damaged,
        partial.exists(),
    )


@contextmanager
def _filled(disk: Path, room: int, kind: str) -> Iterator[None]:
    """The disk with so many free pages or inodes, until the end of the block."""
    filler = disk / "filler"
    filler.mkdir()
    facts = os.statvfs(disk)
    if kind == "pages":
        free = facts.f_bfree * facts.f_frsize // PAGE
        (filler / "pages").write_bytes(bytes((free - room) * PAGE))
    else:
        for n in range(facts.f_ffree - room):
            (filler / str(n)).touch()
    try:
        yield
    finally:
        shutil.rmtree(filler)
