"""From start to end of a run on Ray: nothing stays behind, clusters are joined, signals heeded."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from hybridrl.config.choices import Accelerator, NVLinkMulticast
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import STORE_BYTES
from hybridrl.config.planner.multicast import SWITCHES
from hybridrl.controller.errors import WorkerError
from hybridrl.controller.node_tasks import ObjectStore
from hybridrl.controller.output import rotate_log
from hybridrl.controller.pool import Pool
from hybridrl.controller.ray.ray_probes import cluster_machine, machine_of, ray_nodes
from hybridrl.controller.ray.runtime import MARK, joined_cluster, ray_runtime
from hybridrl.controller.signals import Interrupted, Preemption, shielded, signal_guard
from hybridrl.controller.watch.ray_monitor import RayMonitor
from hybridrl.controller.worker_group import build_roles
from hybridrl.processes.cleanup import marked_processes
from tests.support.controller_roles import AdderConfig, Numbers
from tests.support.controller_run import pool_config

SCRIPT = "tests.support.controller_run"
# Makes a Python one in which hybridrl is not installed.
WITHOUT_HYBRIDRL = """
import sys
class Without:
    def find_spec(name, path=None, target=None):
        if name == "hybridrl":
            raise ModuleNotFoundError(f"No module named '{name}'")
sys.meta_path.insert(0, Without)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_ray_that_does_not_start_is_told_in_a_few_lines(tmp_path):
    cluster = replace(pool_config(tmp_path).cluster, gpus_per_node=-1)
    told = r"Ray did not start(.|\n)*Load of this machine"
    with pytest.raises(ConfigError, match=told), ray_runtime(cluster, Accelerator.cpu):
        pass
    assert not ray.is_initialized()


def run_script(folder, mode, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", SCRIPT, str(folder), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | environment,
    )


def test_sigterm_while_ray_starts(tmp_path):
    """Ray loses exceptions there, and goes on."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, for sockets
        process = run_script(tmp_path, "hang", TMPDIR=folder)
        assert process.stdout.readline() == "starting\n"
        while not (ray_folders := list(Path(folder).iterdir())):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (143, ""), errors
        assert not list(Path(folder).iterdir())
        assert not marked_processes(MARK, ray_folders[0])


@pytest.mark.parametrize(
    ("mode", "whom", "exit_code"),
    [
        pytest.param("succeed", None, 0, id="success", marks=pytest.mark.slow),  # as every run does
        pytest.param("raise", None, 1, id="failure"),
        pytest.param("hang", os.kill, 143, id="SIGTERM to the driver", marks=pytest.mark.slow),
        # as test_what_is_no_worker_may_fall_out_and_sigterm_to_the_group_saves does to a whole run
        pytest.param("hang", os.killpg, 143, id="SIGTERM to its group", marks=pytest.mark.slow),
    ],
)
def test_nothing_stays_behind(tmp_path, mode, whom, exit_code):
    process = run_script(tmp_path, mode)
    assert process.stdout.readline() == "starting\n"
    line = process.stdout.readline()
    assert line, process.stderr.read()
    ray_folder = Path(line.strip())
    assert ray_folder.is_dir()
    if whom is not None:
        time.sleep(1.0)  # the call is in flight now
        whom(process.pid, signal.SIGTERM)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code, errors
    assert time.monotonic() - start < 15.0
    assert not marked_processes(MARK, ray_folder)
    assert not ray_folder.exists()
    assert not list(Path("/dev/shm").glob(f"hybridrl_test_{tmp_path.name}*"))
    assert ("the first domino" in errors) == (mode == "raise")


@pytest.mark.slow
def test_two_runs_in_a_row_in_one_process(tmp_path):
    """As in a sweep: the second starts as the first did, and each ends what it started."""
    token = Path.home() / ".ray" / "auth_token"
    before = signal.getsignal(signal.SIGTERM), token.exists()
    folders = []
    for run in ("first", "second"):
        config = pool_config(tmp_path / run)
        with ray_runtime(config.cluster, config.accelerator):
            node = ray._private.worker._global_node
            assert node.node_ip_address == "127.0.0.1"
            folders.append(Path(node.temp_dir).parent)
            with Pool(config).join() as pool:
                group = build_roles(pool, {"adder": AdderConfig()})["adder"]
                assert group.call("total", Numbers([1, 2]))["total"] == 3
                left_open = [host.pid for host in pool.hosts]
        assert not any(psutil.pid_exists(pid) for pid in left_open)
        assert not marked_processes(MARK, folders[-1])
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)
    assert {"RAY_AUTH_TOKEN", MARK}.isdisjoint(os.environ)
    assert (signal.getsignal(signal.SIGTERM), token.exists()) == before


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """Two Ray nodes on this machine, to be joined by address."""
    root = Path(tempfile.mkdtemp(prefix="hybridrl-test-", dir="/tmp"))  # short, for sockets
    (root / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(root))
    monkeypatch.setenv("HYBRIDRL_FROM_USER", "42")
    node = {"num_cpus": 2, "include_dashboard": False, "temp_dir": str(root)}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(root)
    for left in Path("/dev/shm").glob(
        f"hybridrl_test_{tmp_path.name}_*"
    ):  # by a node that was lost
        left.unlink()


@pytest.mark.slow
def test_two_nodes_of_a_cluster_that_was_there(two_nodes, tmp_path, monkeypatch):
    """Joined by address: engines stay on their nodes, processes end on both, the nodes stay up."""
    assert [node.cores for node in cluster_machine().nodes] == [2, 2]
    config = pool_config(tmp_path, nodes=2, engine=2, multicast=NVLinkMulticast.off)
    of_user = {"NCCL_FROM_USER": "4 2", "NCCL_NVLS_ENABLE": "1"}
    for name, value in of_user.items():  # the cluster's processes do not inherit these
        monkeypatch.setenv(name, value)
    with ray_runtime(config.cluster, config.accelerator):
        with Pool(config).join() as pool:
            nodes = [host.slot.node_id for host in pool.hosts]
            pids = [host.pid for host in pool.hosts]
            group = build_roles(pool, {"adder": AdderConfig(engine=2)})["adder"]
            assert group.call("total", Numbers([1, 2, 3, 4]))["total"] == 20  # both ranks count
            about = group.call("about")
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [entry["LOCAL_RANK"] for entry in about] == ["0", "1", "0", "1"]
    wanted = SWITCHES | {"HYBRIDRL_FROM_USER": "42"} | of_user
    assert all(wanted.items() <= entry["environment"].items() for entry in about)
    assert two_nodes.remaining_processes_alive()
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node", "head"])
def test_a_joined_cluster_that_loses_a_node_or_its_head_is_named_within_a_minute(
    two_nodes, tmp_path, lost
):
    """In a process of its own: Ray ends it a minute after its head is gone."""
    address = two_nodes.address
    process = run_script(tmp_path, "hang on two nodes")
    assert process.stdout.readline() == "starting\n"
    assert process.stdout.readline(), process.stderr.read()
    time.sleep(1.0)  # the call is in flight now
    if lost == "node":
        (other,) = two_nodes.worker_nodes
        node_id = other.node_id
        two_nodes.remove_node(other, allow_graceful=False)
    else:
        two_nodes.head_node.kill_gcs_server()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    if lost == "node":
        assert re.search(rf"WorkerError: rank \d on .*, node {node_id[:8]}\)", errors), errors
    else:
        told = f"WorkerError: Ray's head at {address} does not answer"
        assert told in errors, errors


@contextmanager
def stopped(nodes, kind=PROCESS_TYPE_RAYLET):
    """One process of each node stopped; a node without its raylet Ray counts in for a while yet."""
    there = [node.all_processes[kind][0].process for node in nodes]
    for process in there:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in there:
            process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_closing_does_not_wait_for_one_silent_node_after_the_other(two_nodes, tmp_path):
    two_nodes.add_node(num_cpus=2, include_dashboard=False, temp_dir=os.environ["RAY_TMPDIR"])
    config = pool_config(tmp_path, nodes=3)
    with ray_runtime(config.cluster, config.accelerator):
        pool = Pool(config).join()
        head = two_nodes.head_node.node_id
        near = [host.pid for host in pool.hosts if host.slot.node_id == head]
        with stopped(two_nodes.worker_nodes):
            start = time.monotonic()
            pool.close()
            took_s = time.monotonic() - start
    # 9 s to say what there is and 9 s to end it, whatever the number of nodes.
    assert took_s < 30.0
    assert len(near) == 2 and not any(psutil.pid_exists(pid) for pid in near)


@pytest.mark.slow
def test_a_node_that_does_not_say_what_it_has_is_named(two_nodes, monkeypatch):
    monkeypatch.setattr("hybridrl.controller.ray.ray_probes.REPORT_TIMEOUT_S", 5.0)
    (silent,) = two_nodes.worker_nodes
    with stopped([silent]), pytest.raises(ConfigError, match="`ray status`") as caught:
        cluster_machine()
    assert re.search(rf"1 of 2 nodes .* node {silent.node_id[:8]}\)", str(caught.value))
    assert two_nodes.head_node.node_id[:8] not in str(caught.value)


@pytest.mark.slow
def test_a_node_that_cannot_import_hybridrl_is_named_with_the_reason(
    two_nodes, tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HYBRIDRL)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        bare = two_nodes.add_node(
            num_cpus=2, include_dashboard=False, temp_dir=os.environ["RAY_TMPDIR"]
        )
    with pytest.raises(ConfigError) as caught:
        cluster_machine()
    (told,) = caught.value.texts
    assert "1 of 3 nodes could not report their hardware" in told
    reason = "ModuleNotFoundError: No module named 'hybridrl'"
    assert re.search(rf"node {bare.node_id[:8]}\): {reason}\nInstall the same hybridrl", told), told
    assert two_nodes.head_node.node_id[:8] not in told


@pytest.mark.slow
def test_nodes_that_could_not_be_asked_are_not_called_silent(two_nodes):
    with joined_cluster({}):
        nodes = ray_nodes()
        with (
            stopped([two_nodes.head_node], PROCESS_TYPE_GCS_SERVER),
            pytest.raises(ConfigError, match=r"2 of 2 nodes .* Ray accepted no task") as caught,
        ):
            machine_of(nodes)
    assert len(caught.value.texts) == 1


def test_cluster_that_is_not_there_is_a_config_error(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    config = pool_config(tmp_path)
    with (
        pytest.raises(ConfigError, match="RAY_ADDRESS"),
        ray_runtime(config.cluster, config.accelerator),
    ):
        pass


def test_a_batch_that_ray_finds_no_room_for_is_an_error_of_workers(tmp_path, monkeypatch):
    """What it has no memory for goes to its disk, which is taken for full here."""
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.001")
    config = pool_config(tmp_path)
    large = partial(bytearray, STORE_BYTES[config.accelerator] + 1)
    with (
        ray_runtime(config.cluster, config.accelerator),
        closing(RayMonitor(config.cluster.stall_timeout_s)) as watch,
    ):
        store = ObjectStore(partial(watch.guarded, "sending a batch"))
        with pytest.raises(WorkerError, match="Ray failed in sending a batch: OutOfDiskError"):
            store.reference(large)
        assert ray.get(store.reference(lambda: "small")) == "small"


def test_signals_are_raised_once_and_handlers_return():
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match="SIGTERM"), signal_guard():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGINT"), signal_guard():
        raise KeyboardInterrupt  # as Ray's blocking calls raise it
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_shutting_down_is_not_interrupted():
    done = False
    with pytest.raises(Interrupted, match="SIGTERM"), signal_guard(), shielded():
        signal.raise_signal(signal.SIGTERM)
        done = True
    assert done


def test_an_error_after_sigterm_leaves_as_the_signal():
    """It may come of processes that got the signal, too; nothing is to be started anew for it."""
    with pytest.raises(Interrupted, match="SIGTERM"), signal_guard(), Preemption(60.0):
        signal.raise_signal(signal.SIGTERM)
        raise WorkerError([0], "actor.update", "rank 0 died")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_logs_of_earlier_starts_are_kept_under_numbers(tmp_path):
    log = tmp_path / "node.b_rank0.log"
    for text in ("first", "second", "third"):
        rotate_log(log)
        log.write_text(text)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        "node.b_rank0.1.log": "first",
        "node.b_rank0.2.log": "second",
        "node.b_rank0.log": "third",
    }
