"""Setting aside what a resumed run would collide with: damaged checkpoints and later ones."""

import itertools
import os
from pathlib import Path

from hybridrl.checkpoint import latest
from hybridrl.checkpoint.durable import exists, remove, sync_folder
from hybridrl.checkpoint.find import Found
from hybridrl.checkpoint.leftovers import restore_replaced, steps_in
from hybridrl.checkpoint.names import (
    DAMAGED,
    LATEST,
    SUPERSEDED,
    checkpoints_folder,
    step_name,
)


def set_aside(run_dir: Path, found: Found) -> list[Path]:
    """Rename a run's checkpoints that the course from `found` on will not come from.

    They are those that `found` lists as damaged (damaged_step_...) and all of later steps, which
    exist where an older one was named (superseded_step_...). They are kept for their owner and
    count no more: later saves take the names, and the next resume does not go back to them.
    `latest` names the newest of those that stay, or goes if there is none.

    Args:
        run_dir: the directory of the run that goes on.
        found: what it takes up, of this run or of another one.

    Returns:
        The folders under their new names.

    Raises:
        OSError: something cannot be renamed.
    """
    folder = checkpoints_folder(run_dir)
    damaged = {error.folder.resolve() for error in found.damaged}
    moved = []
    for step in steps_in(folder):
        one = folder / step_name(step)
        is_damaged = one.resolve() in damaged
        if is_damaged or step > found.manifest.step:
            moved.append(_rename(one, DAMAGED if is_damaged else SUPERSEDED))
    if moved:
        sync_folder(folder)
        restore_replaced(folder)
        _point_latest(folder)
    return moved


def _rename(folder: Path, prefix: str) -> Path:
    """Rename a folder, to the first free name."""
    name = prefix + folder.name
    names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(2)))
    new = next(path for path in map(folder.with_name, names) if not exists(path))
    os.rename(folder, new)
    return new


def _point_latest(folder: Path) -> None:
    steps = steps_in(folder)
    if steps:
        latest.prepare(folder, steps[-1])
        latest.replace(folder)
    else:
        remove(folder / LATEST)
