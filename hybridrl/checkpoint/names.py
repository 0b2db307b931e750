"""What files and folders of checkpoints are called.

<run>/checkpoints/step_00000020/             a complete checkpoint
<run>/checkpoints/latest                     the name of the one that was committed last
<run>/checkpoints/.step_00000040.partial/    being written, or what a crash left
<run>/checkpoints/.step_00000020.replaced/   set aside while its successor takes its name
<run>/checkpoints/.step_00000010.removed/    being deleted
<run>/checkpoints/damaged_step_00000060/     kept for its owner, never taken up by itself
<run>/checkpoints/superseded_step_00000060/  likewise: whole, of a course that was left
"""

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
LATEST = "latest"
NEW_LATEST = ".latest.new"

MANIFEST = "manifest.json"
DRIVER = "driver.json"
STATE = "state"

PARTIAL = ".partial"
REPLACED = ".replaced"
REMOVED = ".removed"

DAMAGED = "damaged_"
SUPERSEDED = "superseded_"

_STEP = re.compile(r"step_([0-9]{8,18})")


def checkpoints_folder(run_dir: Path) -> Path:
    """Where a run's checkpoints are."""
    return run_dir / CHECKPOINTS


def step_name(step: int) -> str:
    """The name of a complete checkpoint; names sort as steps do."""
    assert 0 <= step < 10**18, f"no step has the number {step}"
    return f"step_{step:08d}"


def hidden_name(step: int, suffix: str) -> str:
    """The name of a checkpoint's folder in between: PARTIAL, REPLACED or REMOVED."""
    return f".{step_name(step)}{suffix}"


def step_of(name: str) -> int | None:
    """The step of a complete checkpoint by its name; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def hidden_step_of(name: str, suffix: str) -> int | None:
    """The step of a folder in between, by its name; None for any other name."""
    if not name.startswith(".") or not name.endswith(suffix):
        return None
    return step_of(name[1 : -len(suffix)])


def promised_step(name: str) -> int | None:
    """The step that a name of any of these kinds promises; None if it promises none."""
    hidden = (hidden_step_of(name, suffix) for suffix in (PARTIAL, REPLACED, REMOVED))
    shown = (step_of(name.removeprefix(prefix)) for prefix in (DAMAGED, SUPERSEDED))
    return next((step for step in (*hidden, *shown) if step is not None), None)
