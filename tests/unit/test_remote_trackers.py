"""W&B and MLflow get each step of a run once, under one id, however often it starts anew.

Both services are stood in for by small modules that keep what they are told.
"""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from hybridrl.trainer.tracking.tracker import Tracker
from tests.support.run_configs import run_config


class FakeWandb(ModuleType):
    """W&B: runs by their ids, each with the arguments of its starts and its rows."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.starts: list[dict] = []
        self.runs: dict[str, FakeWandbRun] = {}

    def Settings(self, **settings):
        return settings

    def init(self, **arguments):
        self.starts.append(arguments)
        run_id = arguments["id"] or f"w{len(self.runs)}"
        if run_id not in self.runs or arguments["resume"] is None:
            self.runs[run_id] = FakeWandbRun(run_id)
        return self.runs[run_id]


class FakeWandbRun:
    """A run that takes no step twice, as W&B does."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.rows: dict[int, dict] = {}
        self.finished = 0

    def log(self, metrics, step):
        if step > max(self.rows, default=-1):
            self.rows[step] = metrics

    def finish(self):
        self.finished += 1


class FakeMlflowError(Exception):
    pass


class FakeMlflow:
    """A tracking server: experiments by name, runs by id.

    With `meanwhile` another job makes an experiment after this one has looked for it.
    """

    def __init__(self) -> None:
        self.meanwhile = False
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self.uris: list[str] = []

    def client(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        known = self.experiments.get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name):
        if self.meanwhile:
            self.experiments[name] = "e9"
        if name in self.experiments:
            raise FakeMlflowError("RESOURCE_ALREADY_EXISTS")
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def create_run(self, experiment_id):
        run_id = f"m{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(status="RUNNING", params={}, sent=[], was=[])
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert self.runs[run_id].status == "RUNNING" and len(params) <= 100
        self.runs[run_id].sent += metrics
        self.runs[run_id].params |= dict(params)

    def get_metric_history(self, run_id, key):
        return [metric for metric in self.runs[run_id].sent if metric.key == key]

    def set_terminated(self, run_id):
        self.runs[run_id].status = "FINISHED"


def _metric(key, value, timestamp, step):
    return SimpleNamespace(key=key, value=value, timestamp=timestamp, step=step)


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch) -> FakeMlflow:
    fake = FakeMlflow()
    modules = {"mlflow": {}, "mlflow.tracking": {"MlflowClient": fake.client}}
    modules |= {"mlflow.exceptions": {"MlflowException": FakeMlflowError}}
    modules |= {"mlflow.entities": {"Metric": _metric, "Param": lambda *pair: pair}}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def start(folder, steps, *overrides, before=()):
    """One start of a run that takes some steps; its rows."""
    told = ["tracking.tensorboard=false", "tracking.wandb_project=p", "tracking.mlflow_uri=u://x"]
    tracker = Tracker(folder, run_config(*told, *overrides), before)
    for step in steps:
        tracker.log(step, {"time/step_s": 1.0, "reward/mean": step / 2})
    tracker.close()
    assert tracker.failures() == []
    return tracker.rows


def ids(folder) -> dict[str, str]:
    """What the run's directory knows of its trackers."""
    return json.loads((folder / "trackers.json").read_text())


def sent(run) -> list[int]:
    """Steps as MLflow has got them."""
    return [metric.step for metric in run.sent if metric.key == "reward/mean"]


def test_a_run_that_begins_is_made_and_ended_with_its_config_and_steps(tmp_path, wandb, mlflow):
    start(tmp_path, range(3), "trainer.total_steps=7")
    (begun,), (run,) = wandb.starts, wandb.runs.values()
    assert (begun["project"], begun["id"], begun["resume"]) == ("p", None, None)
    assert begun["config"]["trainer"]["total_steps"] == 7
    assert {step: row["reward/mean"] for step, row in run.rows.items()} == {0: 0.0, 1: 0.5, 2: 1.0}
    assert run.finished == 1
    (kept,) = mlflow.runs.values()
    assert (mlflow.uris, list(mlflow.experiments)) == (["u://x"], [begun["name"]])
    assert kept.params["trainer.total_steps"] == "7"
    assert (sent(kept), kept.status) == ([0, 1, 2], "FINISHED")
    assert ids(tmp_path) == {"wandb": "w0", "mlflow": "m0"}


def test_jobs_of_a_sweep_may_make_their_experiment_at_the_same_time(tmp_path, wandb, mlflow):
    mlflow.meanwhile = True
    start(tmp_path, range(3))
    (kept,) = mlflow.runs.values()
    assert (mlflow.experiments, sent(kept)) == ({wandb.starts[0]["name"]: "e9"}, [0, 1, 2])


@pytest.mark.parametrize("kept", [2, 0], ids=["from a checkpoint", "before the first one"])
def test_a_run_that_goes_on_keeps_its_ids_and_no_step_is_there_twice(tmp_path, wandb, mlflow, kept):
    rows = start(tmp_path, range(4))
    start(tmp_path, range(kept, 6), "resume=auto", before=rows[:kept])
    assert [(begun["id"], begun["resume"]) for begun in wandb.starts] == [
        (None, None),
        ("w0", "allow"),
    ]
    (run,) = wandb.runs.values()
    assert (list(run.rows), run.finished) == ([0, 1, 2, 3, 4, 5], 2)
    (kept_run,) = mlflow.runs.values()
    assert (sent(kept_run), kept_run.status) == ([0, 1, 2, 3, 4, 5], "FINISHED")
    assert ids(tmp_path) == {"wandb": "w0", "mlflow": "m0"}


def test_a_run_that_begins_anew_in_its_directory_is_another_one(tmp_path, wandb, mlflow):
    for _ in range(2):
        start(tmp_path, range(3), "resume=none")
    assert (list(wandb.runs), list(mlflow.runs)) == (["w0", "w1"], ["m0", "m1"])
    assert [sent(run) for run in mlflow.runs.values()] == [[0, 1, 2], [0, 1, 2]]
    assert ids(tmp_path) == {"wandb": "w1", "mlflow": "m1"}


def test_a_run_that_takes_up_anothers_checkpoint_is_a_run_of_its_own(tmp_path, wandb, mlflow):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    rows = start(tmp_path / "one", range(3))
    start(tmp_path / "other", range(3, 5), f"resume={tmp_path / 'one'}", before=rows)
    assert (list(wandb.runs), list(mlflow.runs)) == (["w0", "w1"], ["m0", "m1"])
    assert wandb.starts[1]["resume"] is None
    assert sent(mlflow.runs["m1"]) == [3, 4]
    assert ids(tmp_path / "other") == {"wandb": "w1", "mlflow": "m1"}


def test_wandb_is_told_to_keep_no_command_line_git_state_or_code(tmp_path, wandb, mlflow):
    start(tmp_path, range(1))
    settings = wandb.starts[0]["settings"]
    assert (settings["x_disable_meta"], settings["disable_git"]) == (True, True)
    assert settings["save_code"] is False


OFFLINE = """
import sys
from pathlib import Path
from hybridrl.trainer.tracking.sinks import WandbSink
sink = WandbSink("p", "n", Path(sys.argv[1]), {"a": 1}, goes_on=False)
sink.log(0, {"x": 1.0})
sink.close()
"""


def test_wandb_itself_keeps_no_command_line_or_git_state(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")
    work, secret = tmp_path / "work", "hunter22-and-more"
    work.mkdir()
    (work / "main.py").write_text(OFFLINE)
    for call in (["init"], ["remote", "add", "origin", "https://the-remote/x"]):
        subprocess.run(["git", *call], cwd=work, check=True, capture_output=True)
    subprocess.run(
        [sys.executable, "main.py", str(tmp_path), f"+mine.api_key={secret}"],
        cwd=work,
        env=os.environ | {"WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=60,
    )
    files = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    for text in (secret, "the-remote", "main.py"):
        assert [path for path in files if text.encode() in path.read_bytes()] == []


def test_trackers_get_the_config_without_secrets(tmp_path, wandb, mlflow, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "xq7Zp0-unlikely")
    start(tmp_path, range(1), "+reward.args={api_key: hunter22, header: Bearer xq7Zp0-unlikely}")
    told = {"api_key": "***", "header": "Bearer ***"}
    args = wandb.starts[0]["config"]["reward"]["args"]
    assert {key: args[key] for key in told} == told
    params = mlflow.runs["m0"].params
    assert {key: params[f"reward.args.{key}"] for key in told} == told
