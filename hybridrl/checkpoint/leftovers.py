"""What crashes left in a run's folder of checkpoints."""

import os
from contextlib import suppress
from pathlib import Path

from hybridrl.checkpoint.durable import exists, remove, sync_folder
from hybridrl.checkpoint.names import (
    NEW_LATEST,
    PARTIAL,
    REMOVED,
    REPLACED,
    hidden_name,
    hidden_step_of,
    step_name,
    step_of,
)
from hybridrl.checkpoint.reading import names_in


def steps_in(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, rising; none if there is no such folder.

    Raises:
        UnreadableFile: the disk fails, for seconds.
    """
    return sorted(s for s in map(step_of, names_in(folder)) if s is not None)


def hidden_steps_in(folder: Path, suffix: str) -> list[int]:
    """Steps of the folders in between with this suffix, rising; as `steps_in`."""
    steps = (hidden_step_of(name, suffix) for name in names_in(folder))
    return sorted(step for step in steps if step is not None)


def clean(folder: Path) -> None:
    """Remove what an unfinished save or deletion left; nobody may be saving.

    A deletion that cannot be finished is in nobody's way: it is tried again, and told, when the
    save is over (`retention.Removal`).

    Raises:
        OSError: something of a save cannot be removed.
    """
    for step in hidden_steps_in(folder, PARTIAL):
        remove(folder / hidden_name(step, PARTIAL))
    remove(folder / NEW_LATEST)
    restore_replaced(folder)
    with suppress(OSError):
        finish_deletions(folder)


def finish_deletions(folder: Path) -> None:
    """Remove what an unfinished deletion left, as much of it as can be.

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


def restore_replaced(folder: Path) -> None:
    """Give checkpoints that were set aside their names back, unless their successors have them.

    Raises:
        OSError: something cannot be renamed or removed.
    """
    for step in hidden_steps_in(folder, REPLACED):
        aside, final = folder / hidden_name(step, REPLACED), folder / step_name(step)
        if exists(final):
            remove(aside)
        else:
            os.rename(aside, final)
            sync_folder(folder)
