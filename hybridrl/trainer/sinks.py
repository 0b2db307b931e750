"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each works in a thread of its own: imports and slow servers delay no step, and what goes wrong
there is counted and logged once instead of stopping the run.
"""

import io
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.config.schema import TrackingConfig
from hybridrl.trainer.spare_files import GrowingFile, replace_file

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

log = logging.getLogger(__name__)

# Steps that may wait for a slow server; later ones are dropped and counted.
MAX_WAITING = 200
# Characters of a failure that are shown.
MAX_REASON = 200
# Ids of the run with trackers that keep it elsewhere.
TRACKERS_FILE = "trackers.json"
# A metric that every step has.
EVERY_STEP = "time/step_s"
# A step and its finite metrics.
Known = tuple[int, Mapping[str, float]]
_REMEMBERING = Lock()
# W&B knows one run of an id in a process at a time, also while it is being finished.
_ONE_WANDB_RUN = Lock()


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

    Args:
        folder: of the files.
        before: steps of a run that goes on; what a kill has kept from the earlier files is written
            now. Of other steps that these have, readers are told to forget them.
    """

    def __init__(self, folder: Path, before: Sequence[Known]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        shown = min(_last_shown(folder), before[-1][0]) if before else -1
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}"
        self._file = GrowingFile(folder / name)
        self._file.append(_record(Event(wall_time=seconds, file_version="brain.Event:2")))
        begins = SessionLog(status=SessionLog.START)
        self._file.append(_record(Event(wall_time=seconds, step=shown + 1, session_log=begins)))
        for step, metrics in before:
            if step > shown:
                self._append(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars."""
        self._append(step, metrics)
        if self._file.reason is not None:
            raise OSError(self._file.reason)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_record(event))


class WandbSink:
    """A run in a Weights & Biases project.

    A run that goes on sends the steps after its checkpoint again; those that are there already stay
    as they are, for W&B takes no step twice.

    Args:
        project: of the run.
        name: of the run.
        folder: of the run; its W&B id is kept there.
        config: kept beside the metrics.
        goes_on: whether the run of that id is continued.
    """

    def __init__(
        self, project: str, name: str, folder: Path, config: dict[str, Any], *, goes_on: bool
    ) -> None:
        import wandb

        # A login prompt would wait for an answer that nobody gives.
        settings = wandb.Settings(init_timeout=60, login_timeout=10, console="off", silent=True)
        with _ONE_WANDB_RUN:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(folder),
                config=config,
                settings=settings,
                id=known_run(folder, "wandb") if goes_on else None,
                resume="allow" if goes_on else None,
                # W&B would give back a run of this process that was given up before its end.
                reinit="finish_previous",
            )
        remember_run(folder, "wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        with _ONE_WANDB_RUN:
            self._run.finish()


class MLflowSink:
    """A run of an MLflow experiment named like the run.

    Args:
        uri: of the tracking server.
        name: of the experiment.
        folder: of the run; its MLflow id is kept there.
        config: kept as parameters.
        goes_on: whether the run of that id is continued; steps that it has are not sent again.
    """

    def __init__(
        self, uri: str, name: str, folder: Path, config: dict[str, Any], *, goes_on: bool
    ) -> None:
        # MLflow's own defaults keep trying a dead server for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._last = -1
        known = known_run(folder, "mlflow") if goes_on else None
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            sent = self._client.get_metric_history(known, EVERY_STEP)
            self._last = max((metric.step for metric in sent), default=-1)
            return
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        self._run_id = self._client.create_run(experiment_id).info.run_id
        remember_run(folder, "mlflow", self._run_id)
        for key, value in _flat(config).items():
            self._client.log_param(self._run_id, key, value[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars in one request."""
        if step <= self._last:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[Metric(name, value, now, step) for name, value in metrics.items()],
        )

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)


def known_run(folder: Path, tracker: str) -> str | None:
    """The id that a run has with a tracker, as `remember_run` has kept it; None: it has none."""
    path = folder / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")).get(tracker) if path.is_file() else None


def remember_run(folder: Path, tracker: str, run_id: str) -> None:
    """Keep the id that a run has with a tracker, so that it can go on under it."""
    path = folder / TRACKERS_FILE
    with _REMEMBERING:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        text = json.dumps(known | {tracker: run_id})
        replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))


def open_sinks(
    config: TrackingConfig,
    run_name: str,
    run_dir: Path,
    resolved: dict[str, Any],
    before: Sequence[Known] = (),
) -> list[BackgroundSink]:
    """The sinks that conf/tracking asks for.

    Args:
        config: which.
        run_name: run.name.
        run_dir: where files go.
        resolved: the run's config as plain data without secrets, to be kept beside the metrics.
        before: steps that the run goes on from; none: it begins.
    """
    sinks = []
    goes_on = bool(before)
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


def _last_shown(folder: Path) -> int:
    """The last step that readers of the event files in a folder see; -1: none."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    shown = -1
    for path in sorted(folder.glob("events*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                shown = max(shown, event.step)
            elif event.HasField("session_log") and event.session_log.status == SessionLog.START:
                shown = min(shown, event.step - 1)
    return shown


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
