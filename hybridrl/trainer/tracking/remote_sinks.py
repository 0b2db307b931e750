"""Remote trackers: Weights & Biases and MLflow; a run stores its ids in trackers.json."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from hybridrl.trainer.tracking.best_effort_files import replace_file

# Holds the ids of the run.
TRACKERS_FILE = "trackers.json"
# A metric that every step has.
EVERY_STEP = "time/step_s"
_REMEMBERING = Lock()
# W&B supports one run per id and process at a time, also while it finishes.
_ONE_WANDB_RUN = Lock()


class WandbSink:
    """Run in a Weights & Biases project.

    A resumed run sends the steps after its checkpoint again; W&B ignores known steps.
    W&B also records package versions and the machine's load. Command line, git state and program
    are disabled, because they may hold secrets.

    Args:
        project: of the run.
        name: of the run.
        folder: of the run; its W&B id is kept there.
        config: kept beside the metrics.
        goes_on: continue the run of that id, if there is one.
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
        known = known_run(folder, "wandb") if goes_on else None
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


class MLflowSink:
    """Run of an MLflow experiment named like the run.

    Args:
        uri: of the tracking server.
        name: of the experiment.
        folder: of the run; its MLflow id is kept there.
        config: kept as parameters.
        goes_on: continue the run of that id, if there is one; known steps are not sent again.
    """

    def __init__(
        self, uri: str, name: str, folder: Path, config: dict[str, Any], *, goes_on: bool
    ) -> None:
        # MLflow's defaults retry a dead server for minutes.
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
    """Read the run's id in a tracker; None if there is none."""
    path = folder / TRACKERS_FILE
    return json.loads(path.read_text(encoding="utf-8")).get(tracker) if path.is_file() else None


def remember_run(folder: Path, tracker: str, run_id: str) -> None:
    """Store the run's id in a tracker, for resumes."""
    path = folder / TRACKERS_FILE
    with _REMEMBERING:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        text = json.dumps(known | {tracker: run_id})
        replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a config to dotted names."""
    leaves: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return leaves
