"""State of the driver's loop, beside the workers' weights and optimizer state."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.files import DRIVER
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.trainer.advantage import KLControl
from hybridrl.trainer.episodes.responses import Group, decode, encode
from hybridrl.trainer.nonfinite import NonFiniteGuard, SkippedSteps
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine
from hybridrl.trainer.sampling.source import StepSource


@dataclass(frozen=True)
class LoopState:
    """Snapshot of the loop after a finished step.

    All other random choices (mini-batches, samples) are functions of seed and step.

    Attributes:
        prompts_taken: position in the run's sequence of prompts, resampled ones included.
        prompts: fingerprint of that sequence (`PromptSource.fingerprint`).
        kl_coef: weight of the KL penalty in the next step; None without a reference.
        weight_version: updates of the actor so far.
        rollout_is_current: vLLM holds these weights, so that no reshard follows.
        lengths: of responses so far, to balance engines (`ResponseLengths`).
        skipped: optimizer steps skipped in a row (`SkippedSteps`).
        in_flight: responses that later steps continue or train (`responses.encode`).
    """

    step: int
    prompts_taken: int
    prompts: dict[str, str]
    kl_coef: float | None
    weight_version: int
    rollout_is_current: bool
    lengths: dict[str, Any]
    skipped: dict[str, Any]
    in_flight: list[dict[str, Any]] = field(default_factory=list)

    def encode(self) -> bytes:
        """Encode as JSON; floats keep their bits."""
        return (json.dumps(vars(self)) + "\n").encode()


class TrainState:
    """State of the loop, and a snapshot after the last finished step.

    A checkpoint within a step is one of the step before. `commit` is cheap; `finished` passes over
    all prompts seen so far.

    Attributes:
        engine: vLLM, and the number of the actor's weights.
        step: the last finished training step.
    """

    step: int

    def __init__(
        self,
        prompts: PromptSource,
        kl: KLControl,
        engine: HybridEngine,
        guard: NonFiniteGuard,
        lengths: ResponseLengths,
        source: StepSource,
    ) -> None:
        self._lengths = lengths
        self._source = source
        self._prompts = prompts
        self._kl = kl
        self.engine = engine
        self._guard = guard
        self._finished: Callable[..., LoopState]
        self._in_flight: tuple[Group, ...] = ()

    def commit(self, step: int) -> None:
        """Take the snapshot after `step`."""
        self.step = step
        self._lengths.commit()
        self._in_flight = self._source.state()
        self._finished = partial(
            LoopState,
            step=step,
            prompts_taken=self._prompts.position,
            kl_coef=self._kl.coef,
            weight_version=self.engine.weight_version,
            rollout_is_current=self.engine.is_current,
            skipped=asdict(self._guard.skipped),
        )

    def finished(self) -> LoopState:
        """Return the snapshot after the last finished step."""
        return self._finished(
            prompts=self._prompts.fingerprint,
            lengths=self._lengths.state(),
            in_flight=encode(self._in_flight),
        )

    def restore(self, state: LoopState) -> None:
        """Restore a snapshot before the first step; the actor already has its weights."""
        self._prompts.take(state.prompts_taken)
        self._kl.restore(state.kl_coef)
        self._lengths.restore(state.lengths)
        self._source.restore(decode(state.in_flight, self._prompts.by_id))
        self._guard.skipped = SkippedSteps(**state.skipped)
        self.engine.restore(state.weight_version, is_current=state.rollout_is_current)
        self.commit(state.step)


def read_state(checkpoint: Path) -> LoopState:
    """Read the state of a checkpoint.

    Raises:
        DamagedCheckpoint: the file has other fields than `LoopState`, or groups in flight of
            another form.
    """
    try:
        state = LoopState(**json.loads((checkpoint / DRIVER).read_bytes()))
        if any("responses" not in group for group in state.in_flight):
            raise TypeError("groups in flight without responses")
        return state
    except TypeError as error:
        reason = f"is of another version of hybridrl ({error})"
        raise DamagedCheckpoint(checkpoint, DRIVER, reason) from error
