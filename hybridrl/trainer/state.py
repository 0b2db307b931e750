"""What the loop itself remembers from step to step, beside weights and moments: a few numbers.

They stand in <run>/trainer_state.json as they were after the last finished step.
"""

import json
from pathlib import Path
from typing import NamedTuple

from hybridrl.trainer.spare_files import replace_file

STATE_FILE = "trainer_state.json"


class LoopState(NamedTuple):
    """All that a later step takes from earlier ones.

    Attributes:
        step: the last finished training step.
        prompts_taken: position in the run's sequence of prompts, refilled ones included.
        kl_coef: weight of the KL penalty in the next step; None without a reference.
    """

    step: int
    prompts_taken: int
    kl_coef: float | None


def write_state(run_dir: Path, state: LoopState) -> None:
    """Replace the run's state file, which is whole at any instant.

    Raises:
        OSError: the disk does not take it; the old one stays.
    """
    text = json.dumps(state._asdict()) + "\n"
    replace_file(run_dir / STATE_FILE, lambda new: new.write_text(text, encoding="utf-8"))


def read_state(run_dir: Path) -> LoopState:
    """The state after the run's last finished step.

    Raises:
        FileNotFoundError: no step was finished.
        ValueError: the file does not hold exactly the fields of a state.
    """
    text = (run_dir / STATE_FILE).read_text(encoding="utf-8")
    fields = json.loads(text)
    if fields.keys() != set(LoopState._fields):
        raise ValueError(f"{STATE_FILE} has {sorted(fields)}, expected {LoopState._fields}")
    return LoopState(**fields)
