"""Ranks that stop while others wait for them: named, with place and state, before long."""

import json
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from hybridrl.controller.errors import WorkerError
from hybridrl.controller.pool import Pool
from hybridrl.controller.ray.runtime import ray_runtime
from hybridrl.controller.worker_group import build_roles
from hybridrl.distributed.mesh import NO_LIMIT
from tests.support.controller_run import pool_config
from tests.support.stall_roles import StallConfig

LIMIT_S = 4.0


@pytest.fixture(scope="module", autouse=True)
def runtime(tmp_path_factory):
    config = pool_config(tmp_path_factory.mktemp("runtime"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_runtime(config.cluster, config.accelerator):
            yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def pool(runtime, folder):
    with Pool(pool_config(folder, stall_s=LIMIT_S)).join() as pool:
        yield pool


@pytest.fixture(scope="module")
def group(pool):
    return build_roles(pool, {"rollout": StallConfig()})["rollout"]


def see_from_another_node(pool: Pool, patch: pytest.MonkeyPatch) -> None:
    """Let the pool reach its processes as it reaches those of other nodes: by Ray tasks."""
    patch.setattr(pool._nodes, "driver", "another node")
    patch.setattr(pool, "_readers", {})


def idle_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "ray::IDLE" in " ".join(child.cmdline())]


def test_a_process_that_does_not_even_start_is_named_with_its_node(tmp_path):
    """Ray hands out processes that it started in advance; these are stopped."""
    config = pool_config(tmp_path)
    config.cluster.start_timeout_s = 4.0
    while len(idle := idle_processes()) < 2:
        time.sleep(0.1)
    for child in idle:
        child.suspend()
    try:
        with pytest.raises(
            WorkerError, match=r"start: info within .*start_timeout_s=4 s"
        ) as caught:
            Pool(config).close()
    finally:
        for child in idle:
            child.resume()
    named = re.search(r"rank \d on .* \([\d.]+, node \w{8}\), .* pid (\d+): .*", str(caught.value))
    assert named is not None and "stopped by a signal" in named[0], caught.value
    assert int(named[1]) in [child.pid for child in idle]


def test_who_gets_further_or_goes_on_in_time_is_left_alone(pool, group, caplog, monkeypatch):
    see_from_another_node(pool, monkeypatch)
    start = time.monotonic()
    group.call("walk", 9, 0.5)
    assert time.monotonic() - start > LIMIT_S
    assert not caplog.records
    limits, others = group.call("limits")
    assert limits == others and len(limits) >= 4
    assert {*limits.values()} == {NO_LIMIT}, limits

    def let_go_on():
        while f"kill -CONT {pool.hosts[1].pid}" not in caplog.text:
            time.sleep(0.05)
        os.kill(pool.hosts[1].pid, signal.SIGCONT)

    helper = threading.Thread(target=let_go_on, daemon=True)
    helper.start()
    assert group.call("reshard", 1) == [[], []]
    helper.join()


def test_a_job_that_was_suspended_as_a_whole_goes_on(pool, group):
    """As by `scontrol suspend`: this process looks at the ranks before they have moved again."""
    workers = " ".join(str(host.pid) for host in pool.hosts)
    pause = f"kill -STOP {workers} {os.getpid()}; sleep {LIMIT_S + 2}; kill -CONT {os.getpid()}"
    suspend = subprocess.Popen(["sh", "-c", f"sleep 1; {pause}; sleep 1.5; kill -CONT {workers}"])
    start = time.monotonic()
    group.call("walk", 5, 0.5)
    assert time.monotonic() - start > LIMIT_S + 2
    assert suspend.wait() == 0


def test_a_rank_stopped_in_the_middle_of_a_reshard_is_named(pool, group, folder, caplog):
    pids = [host.pid for host in pool.hosts]
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.call("reshard", 1)
    assert LIMIT_S < time.monotonic() - start < LIMIT_S + 15.0
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 10.0
    assert not any(psutil.pid_exists(pid) for pid in pids)

    assert (caught.value.ranks, caught.value.phase) == ([1, 0], "rollout.reshard")
    message = str(caught.value)
    assert re.match(
        r"no rank made progress in rollout\.reshard for cluster\.stall_timeout_s=4 s: "
        r"rank 1 is in bucket 2 of (\d+), rank 0 is in bucket 3 of \1\.\n"
        rf"  rank 1 on .*, pid {pids[1]}: in bucket 2 of \1, stopped by a signal.*"
        rf"kill -CONT {pids[1]}.*start_or_stop \(stall_roles\.py:\d+\)\n",
        message,
    ), message
    assert "_run_buckets (executor.py:" in message
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "rank 1 is in bucket 2 of" in warning and f"kill -CONT {pids[1]}" in warning

    logs = folder / "logs"
    (log,) = logs.glob("*_rank1.log")
    assert str(log) in message and "start_or_stop" in log.read_text()
    assert f"Their last collectives are in {logs}/" in message
    for rank in (0, 1):
        record = json.loads((logs / f"gloo_trace_rank_{rank}.json").read_text())
        names = [entry["profiling_name"] for entry in record["entries"]]
        assert "gloo:all_gather" in names


class WithoutRankOne(Pool):
    """Rank 1 stops before it can join the others.

    Attributes:
        waited_s: how long the last one waited for it.
    """

    waited_s = 0.0

    def _join_rendezvous(self) -> None:
        os.kill(self.hosts[1].pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            super()._join_rendezvous()
        finally:
            WithoutRankOne.waited_s = time.monotonic() - began


class WithoutRankOneElsewhere(WithoutRankOne):
    """It is on another node than the driver."""

    def _join_rendezvous(self) -> None:
        self._nodes.driver, self._readers = "another node", {}
        self._config.cluster.start_timeout_s = 4.0
        super()._join_rendezvous()


def check_that_rank_one_is_named(start: Callable[[], Pool], finding: str) -> None:
    """Start a pool in vain: at its deadline of 4 s, by this finding, with node and state."""
    with pytest.raises(WorkerError) as caught:
        start()
    assert 4.0 <= WithoutRankOne.waited_s < 4.0 + 10.0
    message = str(caught.value)
    assert (caught.value.ranks, caught.value.phase) == ([1], "start: join_rendezvous")
    assert re.match(
        rf"{finding}: rank 1 is idle after start: preload, 1 other has finished\.\n"
        r"  rank 1 on .* \([\d.]+, node \w+\), slot 1, .* stopped by a signal",
        message,
    ), message


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_the_setup_is_named(tmp_path):
    check_that_rank_one_is_named(
        lambda: WithoutRankOne(pool_config(tmp_path, stall_s=LIMIT_S)).join(),
        r"rank 1 has been stopped by a signal in start: join_rendezvous for "
        r"cluster\.stall_timeout_s=4 s",
    )


def test_a_role_that_hangs_while_it_is_built_is_named(tmp_path):
    start = time.monotonic()
    config = pool_config(tmp_path, stall_s=1.0)
    with Pool(config).join() as pool, pytest.raises(WorkerError) as caught:
        config.cluster.start_timeout_s = LIMIT_S
        build_roles(pool, {"rollout": StallConfig(hangs=True)})
    assert time.monotonic() - start < 60.0
    assert caught.value.phase == "start: rollout"
    assert "no rank made progress in start: rollout for cluster.start_t" in str(caught.value)
    assert re.search(r"rank 1 on .*__init__ \(stall_roles\.py:\d+\)", str(caught.value))


def test_a_rank_that_never_arrives_is_named_within_the_deadline(tmp_path):
    check_that_rank_one_is_named(
        lambda: WithoutRankOneElsewhere(pool_config(tmp_path)).join(),
        r"1 rank\(s\) did not finish start: join_rendezvous within cluster\.start_timeout_s=4 s",
    )
