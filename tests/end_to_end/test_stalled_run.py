"""A worker that somebody stops: the run says who, ends with exit code 1, and leaves nothing."""

import os
import re
import signal
import time

import pytest

from tests.end_to_end.runs import SMALL, started

LONG = [*SMALL, "trainer.total_steps=500", "trainer.save_final_model=false"]


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_ended(tmp_path):
    limit = "cluster.stall_timeout_s=10"
    with started(tmp_path / "run", *LONG, "cluster.gpus_per_node=2", limit) as run:
        run.wait_for('"step": 1')
        workers = [pid for pid, title in run.processes().items() if "WorkerHost" in title]
        assert len(workers) == 2, run.processes()
        os.kill(workers[0], signal.SIGSTOP)
        start = time.monotonic()
        output = run.output(timeout=80)
        assert time.monotonic() - start < 10 + 60
        assert run.process.returncode == 1, output
        told = re.findall(rf"rank \d on .* pid {workers[0]}: .*stopped by a signal", output)
        assert len(told) == 2, output  # a warning in time, and the error
        assert output.count("nobody has got further in ") == 2, output
        assert output.count("for cluster.stall_timeout_s=10 s: rank") == 1, output
        assert len(run.metrics()) >= 2
        run.assert_nothing_left()
