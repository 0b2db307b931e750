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

    It also removes leftovers of earlier crashes, so only one process may save at a time. The caller
    writes into the folder, then calls `commit` or `abandon`.

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
    """Publish a written checkpoint under its final name; then it survives a power cut.

    Args:
        partial: returned by `begin`, with every file that the manifest lists.
        manifest: of these files.

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
        OSError: the last one that cannot be removed.
    """
    failed = None
    for step in hidden_steps_in(folder, REMOVED):
        try:
            remove(folder / hidden_name(step, REMOVED))
        except OSError as failure:
            failed = failure
    if failed is not None:
        raise failed


def _sync(partial: Path, manifest: Manifest) -> None:
    """Fsync all files, then the folders that name them."""
    paths = [partial / name for name in (MANIFEST, *manifest.files)]
    for path in paths:
        sync_file(path)
    folders = {partial / STATE, *(folder for path in paths for folder in path.parents)}
    for folder in sorted(folders, reverse=True):
        if folder.is_relative_to(partial):
            sync_folder(folder)
