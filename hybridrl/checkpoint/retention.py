"""Which checkpoints stay: the newest, the best, and the one that `latest` names.

Decided from what is on disk alone, so a run that resumes keeps what the one before it would.
"""

import os
from pathlib import Path

from hybridrl.checkpoint import latest
from hybridrl.checkpoint.durable import remove
from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.names import REMOVED, checkpoints_folder, hidden_name, step_name
from hybridrl.checkpoint.reading import UnreadableFile
from hybridrl.checkpoint.remains import finish_deletions, restore_replaced, steps_in
from hybridrl.checkpoint.verification import verify


def prune(run_dir: Path, keep_last: int, best: str | None = None, keep_best: int = 1) -> list[Path]:
    """Remove the checkpoints of a run that nobody asked to keep.

    A checkpoint whose manifest is damaged or cannot be read, or whose files lack or have another
    size, neither counts nor is removed. Deletion is a rename and then a removal: no half of one is
    ever found.

    Args:
        run_dir: the run's directory.
        keep_last: how many of the newest stay; 0 keeps all.
        best: a metric by which the best stay, too, larger is better; "-name" if smaller is. Ties
            go to the newer one; checkpoints without that metric do not compete.
        keep_best: how many of the best stay.

    Returns:
        The folders that are gone, oldest first.

    Raises:
        OSError: the folder cannot be read, or something not be removed; what stays is whole.
    """
    assert keep_last >= 0 and keep_best >= 0, (keep_last, keep_best)
    folder = checkpoints_folder(run_dir)
    finish_deletions(folder)
    restore_replaced(folder)
    if keep_last == 0:
        return []
    complete = _complete(folder)
    kept = set(sorted(complete)[-keep_last:])
    if best is not None:
        kept.update(best_steps(complete, best)[:keep_best])
    gone = sorted(complete.keys() - kept - {latest.named_step(folder)})
    for step in gone:
        _delete(folder, step)
    return [folder / step_name(step) for step in gone]


def best_steps(manifests: dict[int, Manifest], metric: str) -> list[int]:
    """Steps of the checkpoints that have a metric, best first; see `prune`."""
    name = metric.removeprefix("-")
    sign = -1.0 if metric.startswith("-") else 1.0
    scores = []
    for step, manifest in manifests.items():
        value = manifest.metrics.get(name)
        if value is not None:
            scores.append((sign * value, step))
    return [step for _, step in sorted(scores, reverse=True)]


def _complete(folder: Path) -> dict[int, Manifest]:
    found = {}
    for step in steps_in(folder):
        try:
            found[step] = verify(folder / step_name(step), checksums=False)
        except (DamagedCheckpoint, UnreadableFile):
            continue
    return found


def _delete(folder: Path, step: int) -> None:
    hidden = folder / hidden_name(step, REMOVED)
    os.rename(folder / step_name(step), hidden)
    remove(hidden)
