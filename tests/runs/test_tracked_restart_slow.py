"""A run that starts anew because a worker died stays one run for its trackers."""

import json
import os
import signal

import pytest

from tests.support.runs import SMALL, started

pytestmark = pytest.mark.slow

# Stands in for W&B: notes the arguments of each start.
WANDB = """
import json
from types import SimpleNamespace

Settings = dict

def init(**arguments):
    with open("wandb_starts.jsonl", "a") as file:
        print(json.dumps({name: arguments[name] for name in ("id", "resume")}), file=file)
    return SimpleNamespace(id="w0", log=lambda metrics, step: None, finish=lambda: None)
"""


def test_a_restart_before_the_first_checkpoint_keeps_the_trackers_id(tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    overrides = [*SMALL, "trainer.max_restarts=1", "checkpoint.every_steps=50"]
    overrides += ["tracking.wandb_project=p", "trainer.total_steps=3"]
    with started(tmp_path, *overrides) as run:
        run.wait_for('"step": 1,')
        (worker,) = [pid for pid, title in run.processes().items() if "WorkerHost" in title]
        os.kill(worker, signal.SIGKILL)
        output = run.output()
        assert run.process.returncode == 0, output
    assert "starts anew from its beginning: restart 1 of 1" in output
    lines = (tmp_path / "wandb_starts.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": None, "resume": None},
        {"id": "w0", "resume": "allow"},
    ]
