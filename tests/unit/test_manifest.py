"""The manifest records what is needed to repeat a run, and nobody's secrets."""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.config.planner.machine import GPU, Machine, Node
from hybridrl.data.sources.prompts import DataSetSummary
from hybridrl.trainer.tracking.provenance import git_state, plain, versions, write_manifest
from tests.support.run_configs import run_config

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_manifest_holds_config_versions_hardware_and_command(tmp_path):
    machine = Machine((Node("n0", 8, 2**35, (GPU("H200", 2**37),)),))
    argv = ["main.py", "+recipe=gsm8k_ppo", "seed=7"]
    data = [DataSetSummary("sums", "a.jsonl", 1.0, 90, 10, {"repeated": 3})]
    files = {"model.path": {"tokenizer.json": "00"}}
    facts = {"hardware": machine, "data": data, "models": files}
    path = write_manifest(tmp_path, run_config("seed=7"), facts, started=STARTED, argv=argv)
    manifest = json.loads(path.read_text())
    assert path == tmp_path / "manifest.json"
    assert (manifest["seed"], manifest["run"]) == (7, "gsm8k_ppo")
    assert manifest["started"] == "2026-01-02T03:04:05+00:00"
    assert manifest["argv"] == argv
    assert manifest["config"]["rollout"]["seed"] == 7
    assert manifest["config"]["algorithm"]["kl"]["estimator"] == "k1"
    assert manifest["config"]["actor"]["worker"] == "hybridrl.workers.actor.ActorWorker"
    assert manifest["data"][0]["left_out"] == {"repeated": 3}
    assert manifest["models"] == files
    assert manifest["hardware"]["nodes"][0]["gpus"][0]["name"] == "H200"


def test_versions_are_those_installed():
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert {"ray", "transformers", "hydra-core"} <= found.keys()


def test_secrets_are_hidden_in_config_and_command(tmp_path):
    config = run_config("tracking.mlflow_uri='https://me:hunter2@host/api'")
    argv = ["main.py", "tracking.mlflow_uri=https://me:hunter2@host/api", "+my.api_key=hunter2"]
    path = write_manifest(tmp_path, config, {"HF_TOKEN": "hunter2"}, started=STARTED, argv=argv)
    text = path.read_text()
    assert "hunter2" not in text
    manifest = json.loads(text)
    assert manifest["config"]["tracking"]["mlflow_uri"] == "https://***@host/api"
    assert manifest["argv"][2] == "+my.api_key=***"


def test_keys_that_only_sound_secret_are_kept():
    @dataclass
    class Section:
        max_tokens_per_gpu: int
        token: str | None

    assert plain(Section(16, None)) == {"max_tokens_per_gpu": 16, "token": None}
    assert plain(Section(16, "x"))["token"] == "***"


def test_git_state_names_commit_and_changes(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    file = tmp_path / "__init__.py"
    file.write_text("a")
    git(tmp_path, "add", "__init__.py")
    git(tmp_path, "commit", "-q", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    file.write_text("b")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_package_installed_inside_another_repository_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "__init__.py").write_text("")
    assert git_state(tmp_path / "site-packages") is None


def test_a_run_that_begins_from_anothers_checkpoint_has_no_earlier_starts(tmp_path, caplog):
    found = VerifiedCheckpoint(tmp_path / "other" / "checkpoints" / "step_00000002", None)
    write_manifest(tmp_path, run_config(), {"hardware": {}}, started=STARTED, checkpoint=found)
    assert json.loads((tmp_path / "manifest.json").read_text())["earlier_starts"] == []
    assert caplog.text == ""


def test_a_resumed_run_names_its_checkpoint_and_keeps_its_earlier_starts(tmp_path, monkeypatch):
    found = VerifiedCheckpoint(tmp_path / "checkpoints" / "step_00000002", None)
    for checkpoint, hour in ((None, 3), (found, 4), (found, 5)):
        # As `hybridrl resume` does, after its imports.
        monkeypatch.setattr(sys, "argv", ["hybridrl", f"seed={hour}"])
        write_manifest(
            tmp_path,
            run_config(),
            {"hardware": {}},
            started=STARTED.replace(hour=hour),
            checkpoint=checkpoint,
        )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["resumed_from"] == str(found.folder)
    assert [start["started"][11:13] for start in manifest["earlier_starts"]] == ["03", "04"]
    assert manifest["earlier_starts"][0]["resumed_from"] is None
    starts = [*manifest["earlier_starts"], manifest]
    assert [start["argv"][1] for start in starts] == ["seed=3", "seed=4", "seed=5"]
    write_manifest(tmp_path, run_config(), {"hardware": {}}, started=STARTED)
    assert json.loads((tmp_path / "manifest.json").read_text())["earlier_starts"] == []
