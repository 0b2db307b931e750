"""What the driver's loop remembers from step to step, beside the workers' weights and moments."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.names import DRIVER
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.prompt_source import PromptSource
from hybridrl.trainer.nonfinite import SkippedSteps


@dataclass(frozen=True)
class LoopState:
    """All that a later step takes from earlier ones.

    What else is drawn (mini-batches, samples) is a function of the seed and the step.

    Attributes:
        step: the last finished training step.
        prompts_taken: position in the run's sequence of prompts, refilled ones included.
        prompts: what that sequence is made of (`PromptSource.fingerprint`).
        kl_coef: weight of the KL penalty in the next step; None without a reference.
        weight_version: updates of the actor so far.
        rollout_is_current: whether vLLM holds these weights, so that no reshard comes next.
        lengths: of responses so far, by which prompts are dealt to engines (`ResponseLengths`).
        skipped: optimizer steps skipped in a row (`SkippedSteps`).
    """

    step: int
    prompts_taken: int
    prompts: str
    kl_coef: float | None
    weight_version: int
    rollout_is_current: bool
    lengths: dict[str, Any]
    skipped: dict[str, Any]

    def encode(self) -> bytes:
        """As JSON; floats keep their bits."""
        return (json.dumps(asdict(self)) + "\n").encode()


def loop_state(
    step: int,
    prompts: PromptSource,
    kl_coef: float | None,
    weight_version: int,
    rollout_version: int | None,
    lengths: ResponseLengths,
    skipped: SkippedSteps,
) -> LoopState:
    """The state after a step, which later steps do not change."""
    return LoopState(
        step,
        prompts.position,
        prompts.fingerprint,
        kl_coef,
        weight_version,
        rollout_version == weight_version,
        lengths.state(),
        asdict(skipped),
    )


def read_state(checkpoint: Path) -> LoopState:
    """The state that a checkpoint holds.

    Raises:
        DamagedCheckpoint: the file is not one that `LoopState.encode` makes.
    """
    body = json.loads((checkpoint / DRIVER).read_bytes())
    names = [field.name for field in fields(LoopState)]
    if not isinstance(body, Mapping) or sorted(body) != sorted(names):
        reason = f"has {sorted(body)}, this version of hybridrl reads {sorted(names)}"
        raise DamagedCheckpoint(checkpoint, DRIVER, reason)
    return LoopState(**body)
