"""How a checkpoint appears: whole, under its name, by one rename; `latest` follows."""

import shutil
from pathlib import Path

from hybridrl.checkpoint import latest
from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.durable import put_in_place, remove, sync_file, sync_folder
from hybridrl.checkpoint.leftovers import clean
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.names import (
    MANIFEST,
    PARTIAL,
    REPLACED,
    STATE,
    checkpoints_folder,
    hidden_name,
    hidden_step_of,
    step_name,
)
from hybridrl.checkpoint.verification import verify


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder for the checkpoint of a step, with state/ in it.

    What earlier crashes left is removed first, so one process saves at a time.

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
    """Make a written checkpoint the run's newest; once this returns, a power cut does not undo it.

    A checkpoint of the same step is replaced: it is set aside, stays findable, and is removed when
    its successor has its name for good.

    Args:
        partial: what `begin` returned, with every file that the manifest lists.
        manifest: what is in it.

    Returns:
        The folder under its final name.

    Raises:
        DamagedCheckpoint: files in the folder are not those of the manifest.
        OSError: the disk is full, read-only or broken. Earlier checkpoints and `latest` are as
            they were, unless only the last of it failed: then `latest` is the old or the new one.
    """
    step = hidden_step_of(partial.name, PARTIAL)
    assert step is not None, f"{partial} is no folder that begin() made"
    folder = partial.parent
    manifests.write(partial, manifest)
    verify(partial, checksums=False)
    _sync(partial, manifest)
    latest.prepare(folder, step)
    final, aside = folder / step_name(step), folder / hidden_name(step, REPLACED)
    put_in_place(partial, final, aside)
    sync_folder(folder)
    latest.replace(folder)
    remove(aside)
    return final


def abandon(partial: Path) -> None:
    """Remove what was written of a checkpoint, as far as the disk lets; never fails.

    What stays is removed by the next `begin`.
    """
    assert hidden_step_of(partial.name, PARTIAL) is not None, f"{partial} is not being written"
    shutil.rmtree(partial, ignore_errors=True)


def _sync(partial: Path, manifest: Manifest) -> None:
    """Wait until the disk has all files and the names that lead to them."""
    folders = {partial, partial / STATE}
    for name in (MANIFEST, *manifest.files):
        path = partial / name
        sync_file(path)
        folders.update(p for p in path.parents if p.is_relative_to(partial))
    for one in sorted(folders, reverse=True):
        sync_folder(one)
