"""Nodes that call in: the doctor's processes on this machine, each a node."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import call_all
from hybridrl.doctor.host.facts import HostFacts, host_facts
from hybridrl.doctor.joined import joined_probes, listens_here, parse_place, serve
from hybridrl.doctor.network.infiniband import Fabric, look
from hybridrl.doctor.network.nodes import Choice
from hybridrl.doctor.network.server import Target, reach

pytestmark = pytest.mark.full

SERVE = "import sys; from hybridrl.doctor.joined import serve; serve(sys.argv[1], 20)"
# The command, which says when it calls the head.
CALLER = """
import sys
sys.addaudithook(lambda event, _: event == "socket.connect" and print(event, flush=True))
from hybridrl.doctor.main import main
main()
"""


@pytest.fixture(autouse=True, scope="module")
def key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDRL_DOCTOR_KEY", "k" * 64)
        yield


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def serving(address, count, **environment):
    """`count` nodes beside the head; killed at the end."""
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, address],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


@pytest.fixture(scope="module")
def cluster(key):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with serving(address, 2) as nodes:
        with joined_probes(address, 3, timeout_s=20) as agents:
            yield agents
        assert [node.wait(10) for node in nodes] == [0, 0]


def test_each_node_is_a_process_of_its_own_and_keeps_it(cluster):
    first = call_all(cluster, os.getpid)
    assert first == call_all(cluster, os.getpid)
    assert first[cluster.nodes[0]].value == os.getpid()
    assert len({answer.value for answer in first.values()}) == 3


def test_nodes_that_share_host_and_address_are_told_apart(cluster):
    assert len(set(cluster.nodes)) == 3
    assert all(name.startswith(socket.gethostname()) for name in cluster.nodes)
    assert set(cluster.addresses.values()) == {"127.0.0.1"}


def test_nodes_work_at_the_same_time(cluster):
    start = time.monotonic()
    call_all(cluster, time.sleep, 0.5)
    assert time.monotonic() - start < 1.0


def test_a_function_runs_where_it_has_arguments_alone(cluster):
    node = cluster.nodes[1]
    answers = cluster.call_each(divmod, {node: (7, 2)}, 5.0)
    assert answers[node].value == [3, 1] and list(answers) == [node]


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [(int, ("x",), "ValueError"), (time.sleep, (2.0,), "within 0.3 s"), (open, ("/",), "IsADirec")],
)
def test_a_failure_is_an_answer(cluster, function, arguments, says):
    answers = call_all(cluster, function, *arguments, timeout_s=0.3)
    assert all(says in answer.error for answer in answers.values()), answers


def test_plain_data_keep_their_types_on_the_way(cluster, tmp_path):
    node = cluster.nodes[1]
    facts = cluster.call_each(host_facts, {node: ()}, 20.0)[node].value
    assert type(facts) is HostFacts and facts.limits == host_facts().limits
    fabric = cluster.call_each(look, {node: (tmp_path, tmp_path)}, 5.0)[node].value
    assert fabric == Fabric([], {}, "")
    target = Target("a", "127.0.0.1", 1, "", choice=Choice("a", "X", None, "lo", "127.0.0.1"))
    (problem,) = cluster.call_each(reach, {node: ([target], 5.0)}, 9.0)[node].value
    assert problem.startswith("refused")


def test_what_cannot_travel_is_an_answer(cluster):
    answers = call_all(cluster, object)
    assert len(answers) == 3
    assert all("Unable to serialize" in answer.error for answer in answers.values()), answers


def test_a_node_that_dies_is_an_answer(address):
    with serving(address, 1) as (node,), joined_probes(address, 2, timeout_s=20) as agents:
        other = agents.nodes[1]
        assert agents.call_each(os.getpid, {other: ()}, 5.0)[other].value == node.pid
        node.kill()
        for _ in range(2):
            assert "hung up" in agents.call_each(os.getpid, {other: ()}, 5.0)[other].error


def test_who_called_in_is_named_when_one_is_missing(address):
    with serving(address, 1), pytest.raises(ConfigError) as raised:
        joined_probes(address, 3, timeout_s=1).__enter__()
    (text,) = raised.value.texts
    assert text.startswith("2 of 3 nodes called in within 1 s: 127.0.0.1")
    assert f"--join {address} --nodes 3" in text


def test_another_key_is_refused_on_both_sides(address):
    with serving(address, 1, HYBRIDRL_DOCTOR_KEY="other") as (node,):
        with pytest.raises(ConfigError, match=r"127.0.0.1 has another key \(set HYBRIDRL_DOCTOR_K"):
            joined_probes(address, 2, timeout_s=1).__enter__()
        assert node.wait(10) != 0
        assert "set HYBRIDRL_DOCTOR_KEY to the same word on all nodes" in node.stderr.read()


def test_rays_token_is_the_key_where_there_is_one(address, monkeypatch):
    monkeypatch.delenv("HYBRIDRL_DOCTOR_KEY")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    with serving(address, 1), joined_probes(address, 2, timeout_s=20) as agents:
        assert len(call_all(agents, os.getpid)) == 2


@pytest.mark.parametrize("address", ["192.0.2.1:29400", "127.0.0.1:29400"])
def test_neither_side_speaks_without_a_key(monkeypatch, address):
    for name in ("HYBRIDRL_DOCTOR_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for side in (joined_probes(address, 2, timeout_s=0.5).__enter__, lambda: serve(address, 0.5)):
        with pytest.raises(ConfigError, match="HYBRIDRL_DOCTOR_KEY is not set"):
            side()


def test_with_a_key_an_address_of_no_machine_is_named():
    """192.0.2.1 is no machine's."""
    with pytest.raises(ConfigError, match="cannot listen there"):
        joined_probes("192.0.2.1:29400", 2, timeout_s=0.5).__enter__()
    with pytest.raises(ConfigError, match="cannot reach the head"):
        serve("192.0.2.1:29400", timeout_s=0.5)


def test_a_silent_caller_holds_up_nobody(address):
    agents = joined_probes(address, 2, timeout_s=20)
    with ExitStack() as stack:
        entering = stack.enter_context(ThreadPoolExecutor(1)).submit(agents.__enter__)
        stack.enter_context(connected(address))
        stack.enter_context(serving(address, 1))
        start = time.monotonic()
        assert len(entering.result().nodes) == 2
        assert time.monotonic() - start < 2.0
        agents.__exit__(None, None, None)


def connected(address):
    """A connection to the head, which may take a moment to listen."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(parse_place(address))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_head_that_is_not_there_is_named(address):
    with pytest.raises(ConfigError, match=r"cannot reach the head .* Connection refused"):
        serve(address, 0.5)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_node_that_waits_for_its_head_with_its_own_code(signum):
    command = [sys.executable, "-c", CALLER, "--join", "192.0.2.1:29400", "--nodes", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes["env"] = os.environ | {"HYBRIDRL_DOCTOR_KEY": "a" * 64}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as node:
        assert node.stdout.readline() == "socket.connect\n"
        node.send_signal(signum)
        _, errors = node.communicate(timeout=20)
    assert (node.returncode, errors) == (128 + signum, f"Stopped by {signum.name}\n")


def test_somebody_else_at_the_heads_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="not a doctor that waits for nodes"):
            serve(address, 0.5)
        with pytest.raises(ConfigError, match="cannot listen there: Address already in use"):
            joined_probes(address, 2, 1.0).__enter__()


def test_only_the_node_with_the_heads_address_listens():
    assert listens_here("127.0.0.1:29400")
    assert not listens_here("192.0.2.77:29400")


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", ":1", "a:b", "a:70000"])
def test_a_place_is_host_and_port(text):
    with pytest.raises(ConfigError, match="expected HEAD:PORT"):
        parse_place(text)
    assert parse_place("[fd00::1]:29400") == ("fd00::1", 29400)
