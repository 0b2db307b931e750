"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each works in a thread of its own: imports and slow servers delay no step, and what goes wrong
there is counted and logged once instead of stopping the run.
"""

import io
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.config.schema import TrackingConfig
from hybridrl.trainer.spare_files import GrowingFile

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

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


class TensorBoardSink:
    """TensorBoard event files, record by record (torch's writer imports far more).

    Raises OSError for each step that the disk does not take; it is written with a later one.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest}"
        self._file = GrowingFile(folder / name)
        self._file.append(_record(Event(wall_time=seconds, file_version="brain.Event:2")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_record(event))
        if self._file.reason is not None:
            raise OSError(self._file.reason)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbSink:
    """A run in a Weights & Biases project."""

    def __init__(self, project: str, name: str, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        # A login prompt would wait for an answer that nobody gives.
        settings = wandb.Settings(init_timeout=60, login_timeout=10, console="off", silent=True)
        self._run = wandb.init(
            project=project, name=name, dir=str(folder), config=config, settings=settings
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class MLflowSink:
    """A run of an MLflow experiment named like the run."""

    def __init__(self, uri: str, name: str, config: dict[str, Any]) -> None:
        # MLflow's own defaults keep trying a dead server for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        self._run_id = self._client.create_run(experiment_id).info.run_id
        for key, value in _flat(config).items():
            self._client.log_param(self._run_id, key, value[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[Metric(name, value, now, step) for name, value in metrics.items()],
        )

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)


def open_sinks(
    config: TrackingConfig, run_name: str, run_dir: Path, resolved: dict[str, Any]
) -> list[BackgroundSink]:
    """The sinks that conf/tracking asks for.

    Args:
        config: which.
        run_name: run.name.
        run_dir: where files go.
        resolved: the run's config as plain data without secrets, to be kept beside the metrics.
    """
    sinks = []
    if config.tensorboard:
        sinks.append(
            BackgroundSink("TensorBoard", lambda: TensorBoardSink(run_dir / "tensorboard"))
        )
    if config.wandb_project is not None:
        project = config.wandb_project
        sinks.append(BackgroundSink("W&B", lambda: WandbSink(project, run_name, run_dir, resolved)))
    if config.mlflow_uri is not None:
        uri = config.mlflow_uri
        sinks.append(BackgroundSink("MLflow", lambda: MLflowSink(uri, run_name, resolved)))
    return sinks


def _record(event: "Event") -> bytes:
    """An event as it stands in an event file, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves by their dotted names."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return leaves
