"""Commit of a checkpoint: written under a hidden name, published by one rename; crash cleanup."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import remove, sync_file, sync_folder
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.names import (
    MANIFEST,
    PARTIAL,
    REMOVED,
    STATE,
    checkpoints_folder,
    hidden_name,
    hidden_step_of,
    hidden_steps_in,
    step_name,
)
from hybridrl.checkpoint.verification import verify


def begin(run_dir: Path, step: int) -> Path:
    """Create an empty folder for a checkpoint, with state/ in it.

    It also removes leftovers of earlier crashes, so only one process may save at a time.

    Args:
        run_dir: the run's directory; it exists.
        step: after which the checkpoint is taken.

    Returns:
        The folder to write into, for `commit` or `abandon`.

    Raises:
        OSError: the disk is full, read-only or broken; complete checkpoints are untouched.
    """
    folder = checkpoints_folder(run_dir)
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(run_dir)
    clean(folder)
    partial = folder / hidden_name(step, PARTIAL)
    (partial / STATE).mkdir(parents=True)
    return partial


def commit(partial: Path, manifest: Manifest) -> Path:
    """Publish a written checkpoint; after the return it survives a power cut.

    Args:
        partial: returned by `begin`, with every file that the manifest lists.
        manifest: of these files.

    Returns:
        The folder under its final name.

    Raises:
        DamagedCheckpoint: files in the folder differ from the manifest.
        OSError: the disk is full, read-only or broken, or the step has a checkpoint. Earlier
            checkpoints are untouched.
    """
    step = hidden_step_of(partial.name, PARTIAL)
    assert step is not None, f"{partial} is no folder that begin() made"
    folder = partial.parent
    manifests.write(partial, manifest)
    verify(partial, checksums=False)
    _sync(partial, manifest)
    final = folder / step_name(step)
    os.rename(partial, final)
    sync_folder(folder)
    return final


def abandon(partial: Path) -> None:
    """Remove a partial checkpoint as far as possible; never raises. `begin` removes the rest."""
    assert hidden_step_of(partial.name, PARTIAL) is not None, f"{partial} is not being written"
    shutil.rmtree(partial, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove leftovers of unfinished saves and deletions; no process may be saving.

    A failed deletion does not matter here: `retention.Removal` retries and reports it.

    Raises:
        OSError: something of a save cannot be removed.
    """
    for step in hidden_steps_in(folder, PARTIAL):
        remove(folder / hidden_name(step, PARTIAL))
    with suppress(OSError):
        finish_deletions(folder)


def finish_deletions(folder: Path) -> None:
    """Remove all leftovers of unfinished deletions that can be removed.

    Raises:
        OSError: something cannot be removed.
    """
    failures = []
    for step in hidden_steps_in(folder, REMOVED):
        try:
            remove(folder / hidden_name(step, REMOVED))
        except OSError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _sync(partial: Path, manifest: Manifest) -> None:
    """Fsync all files and the folders that name them."""
    folders = {partial, partial / STATE}
    for name in (MANIFEST, *manifest.files):
        path = partial / name
        sync_file(path)
        folders.update(p for p in path.parents if p.is_relative_to(partial))
    for one in sorted(folders, reverse=True):
        sync_folder(one)
