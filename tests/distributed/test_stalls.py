"""Ranks that stop while others wait for them: named, with place and state, before long."""

import json
import logging
import os
import re
import signal
import threading
import time

import psutil
import pytest
from controller_run import pool_config
from stall_roles import StallConfig

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.pool import Pool
from hybridrl.controller.ray_runtime import ray_runtime
from hybridrl.controller.worker_group import build_roles


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory):
    config = pool_config(tmp_path_factory.mktemp("runtime"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_runtime(config.cluster, config.accelerator):
            yield


def seen_from_another_node(pool: Pool) -> None:
    """Let the pool reach its processes as it reaches those of other nodes: by Ray tasks."""
    pool._nodes.driver = "another node"
    pool._readers = {}


def test_a_rank_stopped_in_the_middle_of_a_reshard_is_named(tmp_path, caplog):
    before = set(os.listdir("/dev/shm"))
    with Pool(pool_config(tmp_path, stall_s=4.0)) as pool:
        group = build_roles(pool, {"rollout": StallConfig()})["rollout"]
        pids = [host.pid for host in pool.hosts]
        start = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            group.call("reshard", 1)
        found = time.monotonic() - start
        start = time.monotonic()
    assert 4.0 < found < 4.0 + 15.0
    assert time.monotonic() - start < 10.0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(os.listdir("/dev/shm")) <= before

    assert (caught.value.ranks, caught.value.phase) == ([1, 0], "rollout.reshard")
    message = str(caught.value)
    assert re.match(
        r"nobody has got further in rollout\.reshard for cluster\.stall_timeout_s=4 s: "
        r"rank 1 is in bucket 2 of (\d+), rank 0 is in bucket 3 of \1\.\n"
        rf"  rank 1 on .*, pid {pids[1]}: in bucket 2 of \1, stopped by a signal.*"
        rf"kill -CONT {pids[1]}.*start_or_stop \(stall_roles\.py:\d+\)\n",
        message,
    ), message
    assert "_run_buckets (mover.py:" in message
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "rank 1 is in bucket 2 of" in warning and f"kill -CONT {pids[1]}" in warning

    logs = tmp_path / "logs"
    (log,) = logs.glob("*_rank1.log")
    assert str(log) in message and "start_or_stop" in log.read_text()
    assert f"Their last collectives are in {logs}/" in message
    for rank in (0, 1):
        record = json.loads((logs / f"gloo_trace_rank_{rank}.json").read_text())
        names = [entry["profiling_name"] for entry in record["entries"]]
        assert set(names) == {"gloo:all_gather"}


def test_who_gets_further_or_goes_on_in_time_is_left_alone(tmp_path, caplog):
    with Pool(pool_config(tmp_path, stall_s=2.5)) as pool:
        group = build_roles(pool, {"rollout": StallConfig()})["rollout"]
        seen_from_another_node(pool)
        start = time.monotonic()
        group.call("walk", 6, 0.5)
        assert time.monotonic() - start > 2.5
        assert not caplog.records

        def let_go_on():
            while f"kill -CONT {pool.hosts[1].pid}" not in caplog.text:
                time.sleep(0.05)
            os.kill(pool.hosts[1].pid, signal.SIGCONT)

        helper = threading.Thread(target=let_go_on, daemon=True)
        helper.start()
        assert group.call("reshard", 1) == [[], []]
        helper.join()


class WithoutRankOne(Pool):
    """Rank 1 stops before it can join the others."""

    def _meet(self) -> None:
        seen_from_another_node(self)
        os.kill(self.hosts[1].pid, signal.SIGSTOP)
        self._config.cluster.start_timeout_s = 4.0
        self.pids = [host.pid for host in self.hosts]
        super()._meet()


def test_a_rank_that_never_arrives_is_named_within_the_deadline(tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        WithoutRankOne(pool_config(tmp_path))
    assert time.monotonic() - start < 45.0
    message = str(caught.value)
    assert (caught.value.ranks, caught.value.phase) == ([1], "start: join_rendezvous")
    assert re.match(
        r"1 rank\(s\) did not finish start: join_rendezvous within cluster\.start_timeout_s=4 s: "
        r"rank 1 is idle after start: import_ahead, 1 other has finished\.\n"
        r"  rank 1 on .* \([\d.]+, node \w+\), slot 1, .* stopped by a signal",
        message,
    ), message
