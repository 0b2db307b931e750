"""Observers for metrics of the start and for callbacks; session.py lists all observers of a run."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.trainer.callbacks import Callback
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.record import Evaluation, Observer, Responses, Row, RunHandle, StepRecord


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
