"""Names of checkpoints' files and folders.

<run>/checkpoints/step_00000020/             a complete checkpoint
<run>/checkpoints/.step_00000040.partial/    being written, or left by a crash
<run>/checkpoints/.step_00000010.removed/    being deleted
<run>/checkpoints/damaged_step_00000060/     quarantined: resume=auto does not use it
<run>/checkpoints/superseded_step_00000060/  quarantined: later than the step resumed from
"""

import re
from pathlib import Path

from hybridrl.checkpoint.files import names_in

CHECKPOINTS = "checkpoints"

MANIFEST = "manifest.json"
DRIVER = "driver.json"
STATE = "state"

PARTIAL = ".partial"
REMOVED = ".removed"

DAMAGED = "damaged_"
SUPERSEDED = "superseded_"

_STEP = re.compile(r"step_([0-9]{8,18})")


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_dir / CHECKPOINTS


def step_name(step: int) -> str:
    """Return the name of a complete checkpoint; names sort as steps do."""
    assert 0 <= step < 10**18, f"no step has the number {step}"
    return f"step_{step:08d}"


def hidden_name(step: int, suffix: str) -> str:
    """Return the name of a checkpoint in transition: PARTIAL or REMOVED."""
    return f".{step_name(step)}{suffix}"


def step_of(name: str) -> int | None:
    """Parse the name of a complete checkpoint; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def hidden_step_of(name: str, suffix: str) -> int | None:
    """Parse the name of a checkpoint in transition; None for any other name."""
    if not name.startswith(".") or not name.endswith(suffix):
        return None
    return step_of(name[1 : -len(suffix)])


def promised_step(name: str) -> int | None:
    """Parse the name of a checkpoint in transition or in quarantine; None for any other name."""
    hidden = (hidden_step_of(name, suffix) for suffix in (PARTIAL, REMOVED))
    shown = (step_of(name.removeprefix(prefix)) for prefix in (DAMAGED, SUPERSEDED))
    return next((step for step in (*hidden, *shown) if step is not None), None)


def steps_in(folder: Path) -> list[int]:
    """List the steps of complete checkpoints, ascending; empty if the folder does not exist."""
    return sorted(s for s in map(step_of, names_in(folder)) if s is not None)


def hidden_steps_in(folder: Path, suffix: str) -> list[int]:
    """List the steps of checkpoints in transition with this suffix, as `steps_in`."""
    steps = (hidden_step_of(name, suffix) for name in names_in(folder))
    return sorted(step for step in steps if step is not None)
