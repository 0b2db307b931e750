"""The ports of Ray's that the doctor tries: those of the Ray that runs, else those it will have."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network import ports as network_ports
from hybridrl.doctor.network.ports import Attempt
from hybridrl.doctor.network.server import (
    Opened,
    Target,
    close_ports,
    open_ports,
    reach,
    running_services,
    service_ports,
    worker_ports,
)

pytestmark = pytest.mark.full

ADDRESS = "127.0.0.7"
DEFAULT = range(19999, 10001, -1)
NODES = {"a": "10.0.1.2", "b": "10.0.1.3"}
OBJECTS = "Ray's object manager"


@contextmanager
def raylet(folder, *arguments):
    """A process that looks like Ray's, with these arguments."""
    program = folder / "raylet"
    program.symlink_to(sys.executable)
    call = [program, "-c", "import sys; sys.stdin.read()", *arguments]
    home = {"PYTHONHOME": sys.base_prefix}
    process = subprocess.Popen(call, stdin=subprocess.PIPE, env=os.environ | home)
    try:
        # The kernel shows the arguments of a new program later than its name.
        while arguments[-1] not in psutil.Process(process.pid).cmdline():
            assert process.poll() is None
            time.sleep(0.01)
        yield
    finally:
        process.communicate()


@contextmanager
def opened_here(**ports):
    """What this process has opened as a node."""
    opened = open_ports(ADDRESS, ADDRESS, [0], **ports)
    try:
        yield opened
    finally:
        close_ports(opened.token)


def free_ports(count):
    """The first of so many ports in a row that are free, none of them the kernel's to give."""
    for first in range(9000, 10000, count):
        with socket.socket() as probe:
            if all(probe.connect_ex((ADDRESS, first + n)) for n in range(count)):
                return range(first, first + count)
    raise AssertionError("no free ports")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--min_worker_port=65000", "--max_worker_port=0"], range(65535, 64999, -1)),
        (["--min_worker_port=0", "--max_worker_port=0"], []),
        (
            ["--min_worker_port=1", "--max_worker_port=2", "--worker_port_list=7000,7002,7001"],
            [7002, 7001, 7000],
        ),
    ],
)
def test_a_raylet_says_which_ports_its_workers_get(words, expected, tmp_path):
    with raylet(tmp_path, "--head", f"--node_ip_address={ADDRESS}", "--x={'a=b': 1}", *words):
        assert worker_ports(ADDRESS) == expected


def test_workers_ports_are_those_of_the_ray_that_runs_on_this_address(tmp_path):
    own = ("--min_worker_port=20000", "--max_worker_port=20099")
    assert worker_ports(ADDRESS) == DEFAULT
    with raylet(tmp_path, f"--node_ip_address={ADDRESS}", *own):
        assert worker_ports("127.0.0.8") == DEFAULT
        with opened_here() as opened:
            assert opened.worker in range(20000, 20100)
    attempt = Attempt("b", Target("a", ADDRESS, opened.worker, "token"), "refused")
    (found,) = network_ports.judge([attempt], {"a": opened}, {"a": ADDRESS, "b": "127.0.0.8"})
    assert found.verdict is Verdict.fail and "on ports 20000 to 20099: open" in found.advice


def test_services_have_eight_ports_on_each_node_until_there_is_a_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert service_ports(NODES) == dict.fromkeys(NODES, range(6379, 6387))
    monkeypatch.setenv("HYBRIDRL_RAY_PORT", "7000")
    assert service_ports(NODES) == dict.fromkeys(NODES, range(7000, 7008))
    assert service_ports({"a": "10.0.1.2"}) == {"a": range(0)}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.1.2:6379")
    assert service_ports(NODES) == dict.fromkeys(NODES, range(0))


@pytest.mark.parametrize("text", ["x", "0", "65530", ""])
def test_a_first_port_that_leaves_no_room_is_refused(text, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HYBRIDRL_RAY_PORT", text)
    with pytest.raises(ConfigError, match="HYBRIDRL_RAY_PORT="):
        service_ports(NODES)


def test_the_ports_of_services_are_connected_to_and_a_taken_one_is_named():
    first, *rest = ports = free_ports(8)
    with socket.create_server((ADDRESS, first)), opened_here(services=ports) as opened:
        here, those = {"a": ADDRESS}, {"a": opened}
        tried, _ = network_ports.connect(LocalProbes("a"), those, here, here, {"a": []})
        reached, taken = network_ports.judge(tried, those, here)
    assert reached.verdict is Verdict.ok
    assert all(str(port) in reached.evidence for port in rest)
    assert (taken.node, taken.verdict) == ("a", Verdict.warn)
    assert f"(pid {os.getpid()}) holds {first}" in taken.evidence
    assert "HYBRIDRL_RAY_PORT" in taken.advice


def test_blocked_ports_of_services_are_named_with_what_to_open():
    ports = free_ports(8)
    with opened_here(services=ports) as opened:
        attempts = [
            Attempt("b", Target("a", ADDRESS, port, opened.token), "no answer")
            for port in ports[1:3]
        ]
        (found,) = network_ports.judge(attempts, {"a": opened}, {"a": ADDRESS, "b": "10.0.1.3"})
    assert found.verdict is Verdict.fail and f"port {ports[1]}: no answer" in found.evidence
    assert f"Ray's services listen on ports {ports[0]} to {ports[-1]}" in found.advice


def test_without_a_joined_ray_no_services_run():
    assert running_services(NODES) == {"a": [], "b": []}


def test_a_service_of_rays_greets_nobody_and_only_has_to_take_connections():
    with socket.create_server((ADDRESS, 0)) as service, socket.create_server((ADDRESS, 0)) as gone:
        ports = [service.getsockname()[1], gone.getsockname()[1]]
        gone.close()
        taken, refused = reach([Target("a", ADDRESS, port, "", OBJECTS) for port in ports], 2.0)
    assert not taken and refused.startswith("refused")


@pytest.mark.parametrize(
    ("port", "blocked", "says"),
    [
        (6381, ["service"], "--object-manager-port on open ones"),
        (40001, ["service"], "--object-manager-port on open ones"),
        (40001, ["service", "chosen"], "open all TCP ports of a for the other nodes"),
        (6381, ["service", "chosen"], "`nc -vz 10.0.1.2 40000` tries it"),
    ],
)
def test_what_to_open_where_a_service_of_a_ray_that_runs_is_blocked(port, blocked, says):
    opened = Opened("token", 29500, 19999, 40000, "", [], (32768, 60999))
    targets = {
        "service": Target("a", NODES["a"], port, "", OBJECTS),
        "chosen": Target("a", NODES["a"], 40000, "token"),
    }
    attempts = [Attempt("b", targets[name], "no answer") for name in blocked]
    (found,) = network_ports.judge(attempts, {"a": opened, "b": opened}, NODES)
    assert (found.check, found.node, found.verdict) == ("network.ports", "b -> a", Verdict.fail)
    assert f"10.0.1.3 -> 10.0.1.2 port {port} (Ray's object manager): no answer" in found.evidence
    assert says in found.advice


def test_services_that_take_connections_are_told():
    opened = Opened("token", 29500, 19999, 40000, "", [], (32768, 60999))
    targets = [Target("a", NODES["a"], 6381, "", OBJECTS), Target("a", NODES["a"], 29500, "token")]
    attempts = [Attempt("b", target, "") for target in targets]
    (found,) = network_ports.judge(attempts, {"a": opened, "b": opened}, NODES)
    assert found.evidence == "2 nodes: 2 connections on ports 29500; Ray's object manager"
