"""Ctrl-C, SIGTERM, a killed worker: the run ends in time, keeps its metrics, leaves nothing."""

import os
import re
import signal
import time

import pytest

from tests.end_to_end.runs import SMALL, started

LONG = [*SMALL, "trainer.total_steps=500", "trainer.save_final_model=false"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, id="sigterm", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_ends_within_15_seconds(tmp_path, number, code):
    with started(tmp_path / "run", *LONG) as run:
        run.wait_for('"step": 2')
        os.kill(run.process.pid, number)
        start = time.monotonic()
        output = run.output(timeout=30)
        assert time.monotonic() - start < 15
        assert run.process.returncode == code, output
        assert "Traceback" not in output
        assert len(run.metrics()) >= 3
        assert (tmp_path / "run" / "metrics.png").is_file()
        run.assert_nothing_left()


def test_killed_worker_is_named_within_a_minute(tmp_path):
    with started(tmp_path / "run", *LONG, "cluster.gpus_per_node=2") as run:
        run.wait_for('"step": 1')
        workers = [pid for pid, title in run.processes().items() if "WorkerHost" in title]
        assert len(workers) == 2, run.processes()
        os.kill(workers[0], signal.SIGKILL)
        output = run.output(timeout=60)
        assert run.process.returncode == 1, output
        told = rf"rank \d on .* pid {workers[0]} failed in .*: its process died "
        assert len(re.findall(told, output)) == 1, output
        assert "(raylet)" not in output
        run.assert_nothing_left()
