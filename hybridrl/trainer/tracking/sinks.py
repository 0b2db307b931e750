"""Trackers besides metrics.jsonl, in the background: Weights & Biases, MLflow, tensorboard.py.

Each has its own thread, so that imports and slow servers delay no step. Failures are counted and
logged once; they do not stop the run. A run stores its W&B and MLflow ids in trackers.json.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from hybridrl.config.checks.checkpoint import NONE
from hybridrl.config.keys import leaves
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.trainer.tracking.provenance import plain
from hybridrl.trainer.tracking.tensorboard import Known, TensorBoardSink

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

TENSORBOARD = "TensorBoard"
# Length of the queue for a slow server; further steps are dropped and counted.
MAX_WAITING = 200
# Characters shown of a failure.
MAX_REASON = 200
# Holds the ids of the run.
TRACKERS_FILE = "trackers.json"
_REMEMBERING = Lock()
# W&B supports one run per id and process at a time, also while it finishes.
_ONE_WANDB_RUN = Lock()


class BackgroundSink:
    """Sink in its own thread, whose failures do not stop the run.

    Attributes:
        failures: number of calls that raised or were dropped.
        reason: the first failure, in one line, or None.
    """

    def __init__(self, name: str, open_sink: Callable[[], Any]) -> None:
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

    def show(self, name: str, step: int, what: "str | Tensor") -> None:
        """Queue a text or a histogram, for TensorBoard; return at once."""
        self._submit(lambda: self._sink.get().show(name, step, what))

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
            if not self._waiting.pop(0).successful():
                error = self._errors.pop(0)
                lines = str(error).strip().splitlines() or [""]
                self._failed(f"{type(error).__name__}: {lines[0]}")

    def _failed(self, reason: str) -> None:
        self.failures += 1
        if self.reason is None:
            self.reason = reason[:MAX_REASON]
            log.warning("%s does not get all metrics: %s; the run goes on", self.name, self.reason)


def open_sinks(
    config: RunConfig, run_dir: Path, before: Sequence[Known] = ()
) -> list[BackgroundSink]:
    """Open the sinks of conf/tracking; `before` has the steps before a resume."""
    tracking, sinks = config.tracking, []
    if tracking.tensorboard:
        opening = partial(TensorBoardSink, run_dir / "tensorboard", before, plain(config))
        sinks.append(BackgroundSink(TENSORBOARD, opening))
    remote = (config.run.name, run_dir, plain(config))
    goes_on = config.resume != NONE
    if tracking.wandb_project is not None:
        wandb = partial(WandbSink, tracking.wandb_project, *remote, goes_on=goes_on)
        sinks.append(BackgroundSink("W&B", wandb))
    if tracking.mlflow_uri is not None:
        mlflow = partial(MLflowSink, tracking.mlflow_uri, *remote, goes_on=goes_on)
        sinks.append(BackgroundSink("MLflow", mlflow))
    return sinks


def close_all(sinks: Sequence[BackgroundSink], timeout_s: float) -> None:
    """Close all sinks concurrently, within `timeout_s` in all."""
    for sink in sinks:
        sink.start_closing()
    deadline = time.monotonic() + timeout_s
    for sink in sinks:
        sink.finish_closing(max(0.0, deadline - time.monotonic()))


class WandbSink:
    """Run in a Weights & Biases project.

    A resumed run sends the steps after its checkpoint again; W&B ignores known steps.
    W&B also records package versions and the machine's load. Command line, git state and program
    are disabled, because they may hold secrets.

    The run's W&B id is kept in `folder`; with `goes_on` the run of that id is continued.
    """

    def __init__(
        self, project: str, name: str, folder: Path, config: dict[str, Any], *, goes_on: bool
    ) -> None:
        import wandb

        settings = wandb.Settings(
            init_timeout=60,
            login_timeout=10,  # a prompt would wait forever
            console="off",
            silent=True,
            x_disable_meta=True,
            disable_git=True,
            save_code=False,
        )
        known = known_runs(folder).get("wandb") if goes_on else None
        with _ONE_WANDB_RUN:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(folder),
                config=config,
                settings=settings,
                id=known,
                resume=None if known is None else "allow",
                # Else W&B returns an unfinished run of this process.
                reinit="finish_previous",
            )
        remember_run(folder, "wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload the rest and finish."""
        with _ONE_WANDB_RUN:
            self._run.finish()


# What MLflow refuses in a name, with all metrics of the request.
REFUSED = re.compile(r"[^\w./\- ]")
# Most params that MLflow takes in a request.
MAX_PARAMS = 100


class MLflowSink:
    """Run of an MLflow experiment named like the run, on the tracking server `uri`.

    `folder` and `goes_on` are as for `WandbSink`; known steps are not sent again.
    """

    def __init__(
        self, uri: str, name: str, folder: Path, config: dict[str, Any], *, goes_on: bool
    ) -> None:
        # MLflow's defaults retry a dead server for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._last = -1
        known = known_runs(folder).get("mlflow") if goes_on else None
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            sent = self._client.get_metric_history(known, "time/step_s")  # every step has it
            self._last = max((metric.step for metric in sent), default=-1)
            return
        self._run_id = self._client.create_run(self._experiment(name)).info.run_id
        remember_run(folder, "mlflow", self._run_id)
        params = [Param(REFUSED.sub("_", k), str(v)[:500]) for k, v in leaves(config).items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment; jobs of a sweep may make it at the same time."""
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                if (experiment := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(experiment.experiment_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send scalars in one request."""
        if step <= self._last:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id,
            metrics=[
                Metric(REFUSED.sub("_", name), value, now, step) for name, value in metrics.items()
            ],
        )

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)


def known_runs(folder: Path) -> dict[str, str]:
    """Read the run's ids by tracker."""
    path = folder / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def remember_run(folder: Path, tracker: str, run_id: str) -> None:
    """Store the run's id in a tracker, for resumes."""
    with _REMEMBERING:
        ids = known_runs(folder) | {tracker: run_id}
        replace_text(folder / TRACKERS_FILE, json.dumps(ids))
