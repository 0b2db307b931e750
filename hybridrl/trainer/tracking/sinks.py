"""Trackers besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each has its own thread, so that imports and slow servers delay no step. Failures are counted and
logged once; they do not stop the run.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import Any

from hybridrl.config.schema import TrackingConfig
from hybridrl.trainer.tracking.remote_sinks import MLflowSink, WandbSink
from hybridrl.trainer.tracking.tensorboard_sink import Known, TensorBoardSink

log = logging.getLogger(__name__)

# Length of the queue for a slow server; further steps are dropped and counted.
MAX_WAITING = 200
# Characters shown of a failure.
MAX_REASON = 200


Sink = TensorBoardSink | WandbSink | MLflowSink


class BackgroundSink:
    """Sink in its own thread, whose failures do not stop the run.

    Args:
        name: for messages.
        open_sink: imports the package and builds the sink.

    Attributes:
        failures: number of calls that raised or were dropped.
        reason: the first failure, in one line, or None.
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.failures = 0
        self.reason: str | None = None
        # Its threads are daemons, which do not delay the end of the process.
        self._pool = ThreadPool(1)
        self._sink = self._pool.apply_async(open_sink)
        self._waiting: list[AsyncResult[None]] = []
        self._errors: list[BaseException] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step's metrics; return at once."""
        self._collect()
        if len(self._waiting) >= MAX_WAITING:
            self._failed(f"{MAX_WAITING} steps are waiting for it")
            return
        self._submit(lambda: self._sink.get().log(step, metrics))

    def start_closing(self) -> None:
        """Queue the close of the sink; return at once."""
        self._submit(lambda: self._sink.get().close())

    def finish_closing(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the close; drop the rest."""
        self._waiting[-1].wait(timeout_s)
        if not self._waiting[-1].ready():
            self._failed(f"it did not end within {timeout_s:.0f} s")
        self._collect()
        self._pool.terminate()

    def _submit(self, call: Callable[[], None]) -> None:
        self._waiting.append(self._pool.apply_async(call, error_callback=self._errors.append))

    def _collect(self) -> None:
        """Count the failures of finished calls. A failed opening fails every call."""
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
    """Close all sinks concurrently, within `timeout_s` in all."""
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
    """Open the sinks of conf/tracking.

    Args:
        config: the tracking section.
        run_name: run.name.
        run_dir: directory of the run.
        resolved: the run's config as plain data without secrets, stored beside the metrics.
        before: steps up to the checkpoint of a resumed run.
        goes_on: the run is resumed in `run_dir`, from any step.
    """
    folder = run_dir / "tensorboard"
    remote = (run_name, run_dir, resolved)
    sinks = []
    if config.tensorboard:
        sinks.append(BackgroundSink("TensorBoard", partial(TensorBoardSink, folder, before)))
    if config.wandb_project is not None:
        wandb = partial(WandbSink, config.wandb_project, *remote, goes_on=goes_on)
        sinks.append(BackgroundSink("W&B", wandb))
    if config.mlflow_uri is not None:
        mlflow = partial(MLflowSink, config.mlflow_uri, *remote, goes_on=goes_on)
        sinks.append(BackgroundSink("MLflow", mlflow))
    return sinks
