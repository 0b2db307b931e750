"""Checkpoints on disk: commit by one rename, clean-up after crashes, retention, quarantine.

A checkpoint is written under a hidden name and published by one rename. The newest and the best
stay; a resume quarantines damaged and later ones. Both depend on the files on disk alone, so a
resumed run keeps the same checkpoints. Pruned ones are renamed at once. Their files, which may be
many gigabytes, are removed by a thread, or by the next process that saves there.
"""

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.files import (
    DAMAGED,
    PARTIAL,
    REMOVED,
    STATE,
    SUPERSEDED,
    UnreadableFile,
    checkpoints_folder,
    exists,
    hidden_in,
    hidden_name,
    promised_step,
    remove,
    step_name,
    steps_in,
    sync_folder,
    sync_tree,
)
from hybridrl.checkpoint.manifest import DamagedCheckpoint, Manifest
from hybridrl.checkpoint.verification import VerifiedCheckpoint, verify


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
    """Publish a folder of `begin` under its final name; then it survives a power cut.

    Raises:
        DamagedCheckpoint: files in the folder differ from the manifest.
        OSError: the disk is full, read-only or broken, or the step has a checkpoint. Earlier
            checkpoints are untouched.
    """
    step = promised_step(partial.name)
    assert step is not None and partial.name.endswith(PARTIAL), f"begin() did not make {partial}"
    folder = partial.parent
    manifests.write(partial, manifest)
    verify(partial, checksums=False)
    sync_tree(partial)
    final = folder / step_name(step)
    os.rename(partial, final)
    sync_folder(folder)
    return final


def abandon(partial: Path) -> None:
    """Remove a partial checkpoint as far as possible; never raises. `begin` removes the rest."""
    assert partial.name.endswith(PARTIAL), f"{partial} is not being written"
    shutil.rmtree(partial, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove leftovers of unfinished saves and deletions; no process may be saving.

    A failed deletion does not matter here: the next one retries and reports it.

    Raises:
        OSError: something of a save cannot be removed.
    """
    for left in hidden_in(folder, PARTIAL):
        remove(left)
    with suppress(OSError):
        finish_deletions(folder)


def finish_deletions(folder: Path) -> None:
    """Remove all leftovers of unfinished deletions that can be removed.

    Raises:
        OSError: the last one that cannot be removed.
    """
    failed = None
    for left in hidden_in(folder, REMOVED):
        try:
            remove(left)
        except OSError as failure:
            failed = failure
    if failed is not None:
        raise failed


def prune(run_dir: Path, keep_last: int, best: str | None = None) -> list[Path]:
    """Rename checkpoints that need not stay; `finish_deletions` deletes them.

    A checkpoint that is damaged (by names and sizes) or unreadable neither counts nor goes.

    Args:
        run_dir: directory of the run.
        keep_last: number of newest ones that stay; 0 keeps all.
        best: metric by which the best stays, too, larger is better; "-name" if smaller is. Of ties
            the newer wins; checkpoints without the metric do not compete.

    Returns:
        The folders that no longer exist, oldest first.

    Raises:
        OSError: the folder cannot be read, or a rename failed; remaining checkpoints are intact.
    """
    if keep_last == 0:
        return []
    folder = checkpoints_folder(run_dir)
    complete: dict[int, Manifest] = {}
    for step in steps_in(folder):
        with suppress(DamagedCheckpoint, UnreadableFile):
            complete[step] = verify(folder / step_name(step), checksums=False)
    kept = {*sorted(complete)[-keep_last:], _best_step(complete, best)}
    gone = sorted(complete.keys() - kept)
    for step in gone:
        os.rename(folder / step_name(step), folder / hidden_name(step, REMOVED))
    return [folder / step_name(step) for step in gone]


def _best_step(manifests: dict[int, Manifest], metric: str | None) -> int | None:
    if metric is None:
        return None
    name, sign = metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0
    values = {step: manifest.metrics.get(name) for step, manifest in manifests.items()}
    scores = [(sign * value, step) for step, value in values.items() if value is not None]
    return max(scores)[1] if scores else None


def quarantine(run_dir: Path, start: VerifiedCheckpoint) -> list[Path]:
    """Quarantine checkpoints that the resumed run will not descend from.

    These are the newer ones that are damaged (damaged_step_...), and others of the step of `start`,
    or later (superseded_step_...). No resume uses them, and later saves reuse the steps.
    Returns the folders under their new names.
    """
    folder = checkpoints_folder(run_dir)
    damaged = {error.folder.resolve() for error in start.damaged}
    moved = []
    for step in steps_in(folder):
        one = folder / step_name(step)
        if one.resolve() in damaged:
            moved.append(_rename(one, DAMAGED))
        elif step >= start.manifest.step and one.resolve() != start.folder.resolve():
            moved.append(_rename(one, SUPERSEDED))
    if moved:
        sync_folder(folder)
    return moved


def _rename(folder: Path, prefix: str) -> Path:
    """Rename a folder to the first free name."""
    name = prefix + folder.name
    names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(2)))
    new = next(path for path in map(folder.with_name, names) if not exists(path))
    os.rename(folder, new)
    return new
