"""Observers for metrics of the start and for callbacks; session.py lists all observers of a run."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.trainer.callbacks import Callback
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.record import Evaluation, Observer, Responses, Row, RunHandle, StepRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FirstMetrics(Observer):
    """Adds metrics of the start to the first step of a run."""

    def __init__(self, metrics: Callable[[], Row]) -> None:
        self._metrics: Callable[[], Row] | None = metrics

    def after(self, record: StepRecord) -> StepRecord:
        """Add them once."""
        metrics, self._metrics = self._metrics, None
        return record if metrics is None else record.adding(metrics())


@dataclass(frozen=True)
class Callbacks(Observer):
    """Observer that calls the user's callbacks.

    An error or exit of a callback becomes RunStopped.
    """

    callbacks: Sequence[Callback]
    run: RunHandle

    def scored(self, step: int, responses: Responses) -> None:
        """Call `on_samples`."""
        if self.callbacks:
            self.run.publish_responses(responses)
            self._call("on_samples", step, self.run.samples)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Call `on_evaluation`."""
        self._call("on_evaluation", step, evaluation.metrics)

    def after(self, record: StepRecord) -> StepRecord:
        """Call `on_step_end`, but not for the evaluation before training."""
        if record.step:
            self._call("on_step_end", record.step, record.metrics)
        return record

    def _call(self, method: str, step: int, value: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, method)(self.run, step, value)
            except (Exception, SystemExit) as error:  # whatever a user's code raises
                where = f"{type(callback).__module__}.{type(callback).__qualname__}.{method}"
                shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                trace = "".join(traceback.format_exception(shown)).rstrip()
                raise RunStopped(f"step {step}: the callback {where} failed:\n{trace}") from error


@dataclass(frozen=True)
class Start:
    """Facts of a run before its workers start, for observers from outside of the core.

    `rows` are the metrics of its steps so far, and grow.
    """

    config: RunConfig
    run_dir: Path
    rows: Sequence[Row]
    prompts: PromptSets
    tokenizer: "PreTrainedTokenizerBase"
    warn: Callable[[str], None]


class OpenedObserver(Observer):
    """Base class of observers from outside of the core (`Prepared.observers`).

    Attributes:
        first: metrics for the first step of a run.
    """

    def __init__(self, start: Start) -> None:
        self.start, self.first = start, Row()

    def begin(
        self, token_stats: Callable[[RolloutBatch], Ragged], place: Callable[[int], str]
    ) -> None:
        """Called when the workers have started.

        `token_stats` returns log-probs after the update, in the real part; `place` describes the
        ranks of a rollout engine.
        """
