"""What the driver's loop remembers from step to step, beside the workers' weights and moments."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.names import DRIVER
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.trainer.hybrid_engine import HybridEngine
from hybridrl.trainer.kl_control import KLControl
from hybridrl.trainer.replay.nonfinite import NonFiniteGuard, SkippedSteps


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
    prompts: dict[str, str]
    kl_coef: float | None
    weight_version: int
    rollout_is_current: bool
    lengths: dict[str, Any]
    skipped: dict[str, Any]

    def encode(self) -> bytes:
        """As JSON; floats keep their bits."""
        return (json.dumps(vars(self)) + "\n").encode()


class TrainState:
    """What the loop carries from step to step, and how it stood after the last finished one.

    A checkpoint that is taken amid a step is one of the step before. To hold on to that costs what
    the step has changed; to tell of it, a pass over all prompts that were seen.

    Args:
        prompts: the training prompts.
        kl: the reference's part.
        engine: the actor's weights and vLLM's.
        guard: counts skipped optimizer steps.

    Attributes:
        lengths: of the responses so far.
        step: the last finished training step.
    """

    step: int

    def __init__(
        self, prompts: PromptSource, kl: KLControl, engine: HybridEngine, guard: NonFiniteGuard
    ) -> None:
        self.lengths = ResponseLengths()
        self._prompts = prompts
        self._kl = kl
        self._engine = engine
        self._guard = guard
        self._finished: Callable[..., LoopState]

    def commit(self, step: int) -> None:
        """Hold on to everything as it is: `step` is finished."""
        self.step = step
        self.lengths.commit()
        self._finished = partial(
            LoopState,
            step=step,
            prompts_taken=self._prompts.position,
            kl_coef=self._kl.coef,
            weight_version=self._engine.weight_version,
            rollout_is_current=self._engine.is_current,
            skipped=asdict(self._guard.skipped),
        )

    def finished(self) -> LoopState:
        """Everything as it was after the last finished step."""
        return self._finished(prompts=self._prompts.fingerprint, lengths=self.lengths.state())

    def restore(self, state: LoopState) -> None:
        """Be as after the step of an earlier run; the actor has that run's weights already."""
        self._prompts.seek(state.prompts_taken)
        if state.kl_coef is not None:
            self._kl.restore(state.kl_coef)
        self.lengths = ResponseLengths.restored(state.lengths)
        self._guard.skipped = SkippedSteps(**state.skipped)
        self._engine.restore(state.weight_version, is_current=state.rollout_is_current)
        self.commit(state.step)


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
