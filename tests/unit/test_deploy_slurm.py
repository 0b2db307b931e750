"""deploy/slurm: the job script runs here on stubs of sbatch, srun, scontrol and ray.

That shows that its parts fit each other, not that they fit a cluster.
"""

import signal
import socket
import subprocess
import time

import pytest

from hybridrl.commands.plan import make_plan, slurm_command
from hybridrl.config.planner.machine import GIB, GPU, planned_machine
from tests.support.deploy_stubs import REPO, Cluster, ended_by, make_cluster

pytestmark = pytest.mark.full

SBATCH = ("sbatch", "--nodes=2", "deploy/slurm/train.sbatch")
TRAIN = ("python", "-m", "hybridrl.main", "+recipe=gsm8k_ppo", "run.name=a b")


@pytest.fixture
def cluster(tmp_path) -> Cluster:
    return make_cluster(tmp_path)


def test_a_command_runs_on_the_head_with_ray_on_all_nodes(cluster):
    code, output = cluster.run(
        *SBATCH,
        "bash",
        "-c",
        'echo "$RAY_ADDRESS $RAY_AUTH_TOKEN ${NCCL_SOCKET_IFNAME:-none} $1"',
        "x",
        "a b",
    )
    assert code == 0, output
    port = cluster.environment["HYBRIDRL_RAY_PORT"]
    tokens = {cluster.ray_environment(node)["RAY_AUTH_TOKEN"] for node in ("node1", "node2")}
    (token,) = tokens
    assert len(token) == 64
    assert f"127.0.1.1:{port} {token} none a b" in output
    assert "--head" in cluster.noted("ray_node1").split()
    assert "--node-ip-address=127.0.1.1" in cluster.noted("ray_node1").split()
    assert f"--address=127.0.1.1:{port}" in cluster.noted("ray_node2").split()
    assert "--node-ip-address=127.0.1.2" in cluster.noted("ray_node2").split()
    assert "--head" not in cluster.noted("ray_node2")
    for number in (1, 2):
        environment = cluster.ray_environment(f"node{number}")
        assert environment["NCCL_SOCKET_IFNAME"] == f"=eth{number}"
        assert environment["GLOO_SOCKET_IFNAME"] == f"eth{number}"
        assert environment["PYTHONUNBUFFERED"] == "1"
        assert environment["RAY_AUTH_MODE"] == "token"
        assert (cluster.folder / f"ray_ended_node{number}").exists()
    assert (
        "ray start on 127.0.1.2 (eth2)"
        in (cluster.checkout / "outputs/slurm/4711/ray.log").read_text()
    )


@pytest.mark.parametrize(
    ("cpus", "asked"), [("2(x2)", "2"), ("4,2", "2"), ("96(x1),128(x1)", "96")]
)
def test_tasks_ask_for_no_more_cores_than_the_smallest_node_has(cluster, cpus, asked):
    code, output = cluster.run(*SBATCH, "true", CPUS=cpus)
    assert code == 0, output
    assert cluster.noted("cpus_per_task") == asked


def test_the_exit_code_is_the_commands(cluster):
    code, output = cluster.run(*SBATCH, "bash", "-c", "exit 3")
    assert code == 3, output
    assert (cluster.folder / "ray_ended_node2").exists()


def test_the_doctor_comes_before_ray_and_is_told_what_the_run_is_told(cluster):
    code, output = cluster.run(*SBATCH, *TRAIN, GPUS_1="8", GPUS_2="4")
    assert code == 0, output
    overrides = "+recipe=gsm8k_ppo run.name=a b cluster.nodes=2"
    report = f"--output {cluster.checkout}/outputs/slurm/4711"
    call = f"-m hybridrl.doctor --join 127.0.1.1:29600 --nodes 2 {report} "
    call += f"doctor.minimal_training=false {overrides}\n"
    assert cluster.noted("doctor_node1") == cluster.noted("doctor_node2") == call
    assert cluster.noted("main") == f"-m hybridrl.main {overrides}\n"
    assert "--num-gpus=8" in cluster.noted("ray_node1").split()
    assert "--num-gpus=4" in cluster.noted("ray_node2").split()


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([*TRAIN[:3], "+a=1"], ["cluster.nodes=2"]),
        (["/opt/bin/hybridrl", "train", "+a=1"], ["cluster.nodes=2"]),
        ([*TRAIN[:3], "cluster.nodes=1", "+a=1"], []),
        (["python", "-m", "mine.main", "+a=1"], []),
    ],
)
def test_the_number_of_nodes_is_added_where_the_command_names_none(given, added):
    script = 'source deploy/launch.sh; NODES=(a b); add_size "$@"; printf "%s\n" "${COMMAND[@]}"'
    call = ["bash", "-euc", script, "-", *given]
    done = subprocess.run(call, cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*given, *added]


def test_a_failing_doctor_ends_the_job(cluster):
    code, output = cluster.run(*SBATCH, *TRAIN, DOCTOR_CODE="2")
    assert code == 2, output
    assert not (cluster.folder / "ray_node1").exists()
    assert not (cluster.folder / "main").exists()


def test_a_node_that_is_not_there_is_named(cluster):
    code, output = cluster.run(*SBATCH, "true", DEAD="node2")
    assert code != 0
    assert "no answer from node2 (1 of 2 nodes)" in output
    assert "Task launch for StepId=4711.0 failed on node node2" in output
    assert not (cluster.folder / "ray_node1").exists()


def test_a_node_that_does_not_come_to_ray_is_named_within_the_deadline(cluster):
    start = time.perf_counter()
    code, output = cluster.run(*SBATCH, "true", NO_RAY="node2", HYBRIDRL_START_S="1")
    assert code == 1
    assert "Ray has 1 of 2 nodes after 1 s; missing: node2 (127.0.1.2)" in output
    assert time.perf_counter() - start < 20
    assert (cluster.folder / "ray_ended_node1").exists()


def test_a_ray_that_breaks_ends_the_wait(cluster):
    start = time.perf_counter()
    code, output = cluster.run(*SBATCH, "true", NO_RAY="node2", BROKEN_RAY="node2")
    assert code == 1, output
    assert "1: ray broke" in output
    assert time.perf_counter() - start < 10
    assert (cluster.folder / "ray_ended_node1").exists()


def test_a_taken_port_is_named(cluster):
    port = int(cluster.environment["HYBRIDRL_RAY_PORT"]) + 2
    with socket.create_server(("127.0.1.1", port)):
        code, output = cluster.run(*SBATCH, "true")
    assert code == 1
    assert f"port {port} is taken" in output
    assert "Set HYBRIDRL_RAY_PORT" in output


def test_one_node_needs_no_ray(cluster):
    code, output = cluster.run(
        "sbatch", "--nodes=1", SBATCH[2], "bash", "-c", "echo address ${RAY_ADDRESS:-none}; exit 4"
    )
    assert code == 4, output
    assert "address none" in output
    assert not (cluster.folder / "ray_node1").exists()


@pytest.mark.parametrize(
    ("code", "how", "queued"),
    [
        (75, "resume=auto", True),
        (143, "resume=auto", True),
        (75, "resume=none", False),
        (1, "resume=auto", False),
    ],
)
def test_a_job_that_was_saved_goes_back_into_the_queue(cluster, code, how, queued):
    """After Ray has ended on both nodes."""
    exited, output = cluster.run(*SBATCH, "bash", "-c", f"exit {code}", "command", how)
    assert exited == code, output
    assert ("requeued 4711, Ray ended: 2" in output) == queued, output
    assert ("would go on by itself" in output) == (how == "resume=none"), output


def test_sigterm_reaches_the_command_and_its_exit_code_stays(cluster):
    """As Slurm sends it before the job's time is over."""
    command = "trap 'echo ending; exit 143' TERM; touch $0; while true; do sleep 0.1; done"
    started = cluster.folder / "started"
    process = cluster.start(*SBATCH, "bash", "-c", command, str(started))
    while not started.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    code, output = ended_by(process, signal.SIGTERM)
    assert code == 143
    assert "ending" in output
    assert (cluster.folder / "ray_ended_node2").exists()


def test_a_planned_job_runs_its_command_with_what_a_requeue_needs(cluster, monkeypatch):
    monkeypatch.chdir(cluster.checkout)
    sizes = ["cluster.nodes=2", "cluster.gpus_per_node=8", "run.name=my run"]
    machine = planned_machine([8, 8], GPU("GPUs", 80 * GIB))
    config = make_plan(["model=qwen2_5_7b", *sizes], machine).examined.config
    command = slurm_command(config, ["python", "-m", "hybridrl.main", "cluster.nodes=2"])
    assert command[:4] == ["sbatch", "--job-name=my run", "--nodes=2", "--gpus-per-node=8"]
    code, output = cluster.run(*command, HYBRIDRL_DOCTOR="off")
    assert code == 0, output
    resumed = "cluster.nodes=2 resume=auto hydra.run.dir='outputs/my run'"
    assert cluster.noted("main") == f"-m hybridrl.main {resumed}\n"
