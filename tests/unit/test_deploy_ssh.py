"""deploy/ssh: the script runs here on stubs of ssh and ray; what is shared is in test_deploy_slurm.

The stub gives what it runs an empty environment, as sshd does, and an end of stdin when ssh ends.
"""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from hybridrl.controller.ray.runtime import PASSED_ON
from tests.support.deploy_stubs import Cluster, ended_by, make_cluster

pytestmark = pytest.mark.full

TRAIN = ("bash", "deploy/ssh/train.sh", "hosts", "--")


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    cluster = make_cluster(tmp_path)
    (cluster.checkout / "hosts").write_text("# head first\nnode1\n\nnode2  # the other\n")
    return cluster


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    """Until a file is there."""
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_the_command_runs_on_the_first_host_with_ray_on_all(cluster):
    script = 'echo "$RAY_ADDRESS $NODE_NAME $RAY_AUTH_TOKEN ${NCCL_SOCKET_IFNAME:-none} $1"; exit 3'
    code, output = cluster.run(
        *TRAIN, "bash", "-c", script, "x", "it's $HOME", HF_HOME="/a b", OTHER="kept"
    )
    assert code == 3, output
    port = cluster.environment["HYBRIDRL_RAY_PORT"]
    first, second = (cluster.ray_environment(node) for node in ("node1", "node2"))
    assert first["RAY_AUTH_TOKEN"] == second["RAY_AUTH_TOKEN"]
    assert f"127.0.1.1:{port} node1 {first['RAY_AUTH_TOKEN']} none it's $HOME" in output
    assert first["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert second["NCCL_SOCKET_IFNAME"] == "=eth2"
    assert second["HF_HOME"] == "/a b"
    assert "OTHER" not in second
    assert "--head" in cluster.noted("ray_node1").split()
    assert f"--address=127.0.1.1:{port}" in cluster.noted("ray_node2").split()
    assert (cluster.folder / "ray_ended_node1").exists()
    assert (cluster.folder / "ray_ended_node2").exists()
    (log,) = (cluster.checkout / "outputs/ssh").glob("*/ray.log")
    assert "node2: ray start on 127.0.1.2 (eth2)" in log.read_text()
    calls = cluster.noted("ssh_calls")
    assert first["RAY_AUTH_TOKEN"] not in calls
    assert "/a b" not in calls


def test_hosts_may_be_named_with_a_user(cluster):
    (cluster.checkout / "hosts").write_text("me@node1\nme@node2\n")
    code, output = cluster.run(*TRAIN, "true")
    assert code == 0, output
    assert "me@node2: 127.0.1.2 on eth2" in output


def test_a_host_that_cannot_be_reached_is_named(cluster):
    code, output = cluster.run(*TRAIN, "true", DEAD="node2")
    assert code != 0
    assert "no answer from node2 (1 of 2 nodes)" in output
    assert "ssh: connect to host node2 port 22: No route to host" in output
    assert not (cluster.folder / "ray_node1").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_hosts_end_what_they_run_when_the_script_is_ended(cluster, signum):
    script = "trap 'touch $0.ended; exit 143' TERM; touch $0; while true; do sleep 0.1; done"
    started = cluster.folder / "started"
    process = cluster.start(*TRAIN, "bash", "-c", script, str(started))
    wait_for(started, process)
    code, output = ended_by(process, signum)
    if signum != signal.SIGKILL:
        assert code == 143, output
    deadline = time.monotonic() + 10
    ends = [cluster.folder / name for name in ("started.ended", "ray_ended_node2")]
    while not all(end.exists() for end in ends):
        assert time.monotonic() < deadline, output
        time.sleep(0.05)


def test_hosts_get_whatever_the_program_passes_on_to_its_workers(cluster):
    names = [f"{prefix}X" if prefix.endswith(("_", "TORCH")) else prefix for prefix in PASSED_ON]
    code, output = cluster.run(*TRAIN, "env", **dict.fromkeys(names, "first\nsecond"))
    assert code == 0, output
    assert [name for name in names if f"{name}=first\nsecond" not in output] == []


def test_without_a_command_it_says_how_it_is_called(cluster):
    code, output = cluster.run(*TRAIN[:3])
    assert code == 2
    assert "deploy/ssh/train.sh HOSTFILE -- python -m hybridrl.main" in output
