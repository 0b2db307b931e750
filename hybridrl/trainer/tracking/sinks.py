"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each works in a thread of its own: imports and slow servers delay no step, and what goes wrong
there is counted and logged once instead of stopping the run.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any, Protocol

from hybridrl.config.schema import TrackingConfig
from hybridrl.trainer.tracking.remote_sinks import MLflowSink, WandbSink
from hybridrl.trainer.tracking.tensorboard_sink import Known, TensorBoardSink

log = logging.getLogger(__name__)

# Steps that may wait for a slow server; later ones are dropped and counted.
MAX_WAITING = 200
# Characters of a failure that are shown.
MAX_REASON = 200


class Sink(Protocol):
    """Something that keeps metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's finite metrics."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


class BackgroundSink:
    """A sink that is opened and fed in a thread of its own and may fail without harm.

    Args:
        name: for messages.
        open_sink: imports what it needs and makes the sink.

    Attributes:
        failures: calls that raised or were dropped.
        reason: the first failure, in one line, or None.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.failures = 0
        self.reason: str | None = None
        # Of the standard pools the one whose threads do not keep a program from ending.
        self._pool = ThreadPool(1)
        self._sink = self._pool.apply_async(open_sink)
        self._waiting: list[AsyncResult[None]] = []
        self._errors: list[BaseException] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over one step's metrics; returns at once."""
        self._collect()
        if len(self._waiting) >= MAX_WAITING:
            self._failed(f"{MAX_WAITING} steps are waiting for it")
            return
        self._submit(lambda: self._sink.get().log(step, metrics))

    def start_closing(self) -> None:
        """Let the sink end when it has taken what waits; returns at once."""
        self._submit(lambda: self._sink.get().close())

    def finish_closing(self, timeout_s: float) -> None:
        """Wait for the end, but no longer than `timeout_s`; then what is left is given up."""
        self._waiting[-1].wait(timeout_s)
        if not self._waiting[-1].ready():
            self._failed(f"it did not end within {timeout_s:.0f} s")
        self._collect()
        self._pool.terminate()

    def _submit(self, call: Callable[[], None]) -> None:
        self._waiting.append(self._pool.apply_async(call, error_callback=self._errors.append))

    def _collect(self) -> None:
        """Note what has ended since the last look. A failed opening fails every call."""
        while self._waiting and self._waiting[0].ready():
            ended = self._waiting.pop(0)
            if not ended.successful():
                error = self._errors.pop(0)
                lines = str(error).strip().splitlines() or [""]
                self._failed(f"{type(error).__name__}: {lines[0]}")

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if self.reason is None:
            self.reason = reason[:MAX_REASON]
            log.warning("%s does not get all metrics: %s; the run goes on", self.name, self.reason)


def close_all(sinks: Sequence[BackgroundSink], timeout_s: float) -> None:
    """End all sinks at the same time, within `timeout_s` together."""
    for sink in sinks:
        sink.start_closing()
    deadline = time.monotonic() + timeout_s
    for sink in sinks:
        sink.finish_closing(max(0.0, deadline - time.monotonic()))


def open_sinks(
    config: TrackingConfig,
    run_name: str,
    run_dir: Path,
    resolved: dict[str, Any],
    before: Sequence[Known] = (),
    *,
    goes_on: bool = False,
) -> list[BackgroundSink]:
    """The sinks that conf/tracking asks for.

    Args:
        config: which.
        run_name: run.name.
        run_dir: where files go.
        resolved: the run's config as plain data without secrets, to be kept beside the metrics.
        before: steps that the run goes on from.
        goes_on: whether it is the run that began in `run_dir`, from however early a step.
    """
    sinks = []
    if config.tensorboard:
        sinks.append(
            BackgroundSink("TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard", before))
        )
    if config.wandb_project is not None:
        project = config.wandb_project
        open_wandb = lambda: WandbSink(project, run_name, run_dir, resolved, goes_on=goes_on)  # noqa: E731
        sinks.append(BackgroundSink("W&B", open_wandb))
    if config.mlflow_uri is not None:
        uri = config.mlflow_uri
        open_mlflow = lambda: MLflowSink(uri, run_name, run_dir, resolved, goes_on=goes_on)  # noqa: E731
        sinks.append(BackgroundSink("MLflow", open_mlflow))
    return sinks
