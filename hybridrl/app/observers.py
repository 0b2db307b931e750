"""Observers of a run, in the order in which they are called."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.callbacks import Callback
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.health.health import Health
from hybridrl.trainer.health.measures import MarkedTokens
from hybridrl.trainer.health.observer import HealthChecks
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.record import Evaluation, Observer, Responses, Row, RunHandle, StepRecord
from hybridrl.trainer.timing.engines import engine_place
from hybridrl.trainer.timing.phases import GraceCheck
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.progress import Progress
from hybridrl.trainer.tracking.records import Records
from hybridrl.trainer.tracking.tracker import Tracker
from hybridrl.trainer.updates import Updates


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
class ObserverParts:
    """What observers are made of; `open` makes them.

    Attributes:
        first: metrics of the start.
        decode: token ids -> texts, special tokens included.
        marked: end tokens and special tokens of the model.
    """

    config: RunConfig
    run_dir: Path
    run: RunHandle
    console: RunConsole
    tracker: Tracker
    throughput: Throughput
    health: Health
    checkpoints: Checkpointer
    callbacks: Sequence[Callback]
    first: Callable[[], Row]
    decode: Decode
    marked: MarkedTokens

    def open(self, updates: Updates, guard: NonFiniteGuard) -> list[Observer]:
        """Return the observers of a run; later ones see what earlier ones add."""
        config, console, tracker, checkpoints = (
            self.config,
            self.console,
            self.tracker,
            self.checkpoints,
        )
        records = Records(
            config, self.run_dir, self.run.records, updates, self.decode, console, tracker
        )
        place = partial(engine_place, updates.workers.rollout)
        return [
            FirstMetrics(self.first),
            self.throughput,
            records,
            HealthChecks(self.health, self.marked, self.decode, updates.token_stats, place),
            Progress(config, console, tracker, records.failures, lambda: checkpoints.failures),
            checkpoints,
            GraceCheck(config.checkpoint.on_sigterm, console.warn, lambda: checkpoints.write_s),
            guard,
            Callbacks(self.callbacks, self.run),
        ]
