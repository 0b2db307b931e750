"""`latest`: a text file with the name of the checkpoint that was committed last.

It is for people and scripts. What a run resumes from is decided by what is on disk, for `latest`
may be older than the newest checkpoint (killed between the two) or missing.
"""

import os
from pathlib import Path

from hybridrl.checkpoint.durable import sync_folder, write_file
from hybridrl.checkpoint.names import LATEST, NEW_LATEST, step_name, step_of

_LONGEST = 64  # bytes


def prepare(folder: Path, step: int) -> None:
    """Write the next `latest` beside the present one: what may fail on a full disk.

    Args:
        folder: a run's checkpoints.
        step: that it is to name.

    Raises:
        OSError: the disk is full, read-only or broken; `latest` is as it was.
    """
    write_file(folder / NEW_LATEST, f"{step_name(step)}\n".encode())


def replace(folder: Path) -> None:
    """Let the prepared `latest` take the place of the present one, at once and for good.

    Raises:
        OSError: the disk is read-only or broken; `latest` is the one or the other.
    """
    os.replace(folder / NEW_LATEST, folder / LATEST)
    sync_folder(folder)


def named_step(folder: Path) -> int | None:
    """The step that `latest` names; None if it is missing or names none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with (folder / LATEST).open("rb") as file:
            text = file.read(_LONGEST)
    except FileNotFoundError:
        return None
    return step_of(text.decode("ascii", "replace").strip())
