"""The first hour of a user, in a new folder outside the repository, by the commands alone."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import ROOT

SMALL = [
    "data.prompts_per_step=16",
    "rollout.responses_per_prompt=4",
    "data.num_eval_problems=20",
]


def hybridrl(folder: Path, *arguments: str, timeout: float = 300) -> str:
    """Run `hybridrl <arguments>` in a folder; its stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def task(tmp_path):
    """A new task, whose next commands are told."""
    told = hybridrl(tmp_path, "init", "my_task")
    assert "hybridrl check +recipe=my_task" in told and "hybridrl train +recipe=my_task" in told
    return tmp_path / "my_task"


def test_a_new_task_is_read_rewarded_and_planned(task):
    """The short form: no process but the reward's is started."""
    told = hybridrl(task, "check", "+recipe=my_task", "--no-samples")
    assert len(re.findall(r"data\.jsonl:\d+: \d+ tokens", told)) == 10
    assert "950 training, 50 held out" in told
    assert "0.0% unknown tokens" in told
    assert re.search(r"reference answers: mean 1\.000", told)
    assert re.search(r"answers of other problems: mean 0\.0\d+", told)
    assert "empty answers: mean 0.000" in told
    assert "Predicted memory of one rank by phase" in told
    assert sorted(path.name for path in task.iterdir()) == sorted(
        ["README.md", "data.jsonl", "recipe", "reward.py", "test_reward.py"]
    )


def test_rewards_that_do_not_tell_right_from_wrong_are_named(task):
    (task / "reward.py").write_text("def score(prompt, response, example):\n    return 0.5\n")
    told = hybridrl(task, "check", "+recipe=my_task", "--no-samples")
    assert "rewarded no higher than wrong ones" in told


@pytest.mark.parametrize(("name", "told"), [("my task", "is no name"), (".", "not an empty")])
def test_a_folder_that_cannot_be_a_task_is_refused(name, told, tmp_path):
    folder = tmp_path / "used_folder"
    folder.mkdir()
    (folder / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "init", name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour(task):
    """At most six minutes on two cores that do nothing else."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=task, check=True, timeout=60)
    told = hybridrl(task, "check", "+recipe=my_task")
    assert re.search(r"\d+ of 32 prompts \(\d+%\) have responses with different rewards", told)
    assert "before training: 32 problems x 8 samples: 256 calls of the reward" in told
    assert len(re.findall(r"  reward [-\d.]+, \d+ tokens, after a prompt", told)) == 2
    told = hybridrl(task, "train", "+recipe=my_task", *SMALL)
    run = (task / "outputs" / "latest").resolve()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 20
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.1
    assert re.search("hybridrl eval .* --run-code", told)  # the reward is the task's
    assert "hybridrl export" in told and "hybridrl resume" in told
    assert "my_task" in hybridrl(task, "runs")
    told = hybridrl(task, "eval", "outputs/latest", "--run-code", "--samples", "2")
    assert "pass@2" in told
    told = hybridrl(task, "resume", "latest", "trainer.total_steps=22")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 22
    hybridrl(task, "export", "outputs/latest", "exported")
    assert (task / "exported" / "config.json").is_file()
    few = ["trainer.total_steps=1", "data.num_eval_problems=5", *SMALL[:2]]
    told = hybridrl(task, "train", "+recipe=my_task", "-m", "seed=1,2", *few)
    assert "seed=1" in told and "seed=2" in told
    assert time.monotonic() - start < 360
