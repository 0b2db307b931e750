"""Workers that somebody stops or kills: the run says who, ends with exit code 1, leaves nothing."""

import contextlib
import os
import re
import signal
import socket
import time

import pytest

from tests.support.runs import SMALL, started

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
        assert output.count("no rank made progress in ") == 2, output
        assert output.count("for cluster.stall_timeout_s=10 s: rank") == 1, output
        assert len(run.metrics()) >= 2
        run.assert_nothing_left()


@pytest.mark.slow
def test_a_restart_that_cannot_begin_leaves_the_workers_failure(tmp_path):
    """Somebody takes the rendezvous port as soon as the killed worker has let it go."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    restarts = [*LONG, "cluster.gpus_per_node=1", "trainer.max_restarts=1"]
    with started(tmp_path / "run", *restarts, env=env) as run, socket.socket() as taken:
        run.wait_for('"step": 1')
        (worker,) = [pid for pid, title in run.processes().items() if "WorkerHost" in title]
        os.kill(worker, signal.SIGKILL)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while taken.getsockname()[1] != port:
            with contextlib.suppress(OSError):  # not let go yet
                taken.bind(("", port))
        taken.listen()
        output = run.ended(1, timeout=120)
        assert "Restart 1 (trainer.max_restarts) could not begin:" in output
        assert f"port {port}" in output and "its process died" in output
