"""What the stage ray makes of invented facts of several nodes."""

import socket
import socketserver
import threading
import time

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray import runtime
from hybridrl.controller.ray.cluster_view import ClusterView, HeadReply, NodeState
from hybridrl.controller.ray.head import Connection, connect
from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.controller.ray.ray_probes import RayProbes
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.ray import (
    RayFacts,
    examine,
    judge_reachable,
    judge_tokens,
    judge_versions,
    judge_view,
    ray_facts,
)

pytestmark = pytest.mark.full

ADDRESS = "10.0.1.2:6379"
REACHED = Connection("", 0.001, True, "")


def facts(version="2.60.0", mode=None, token="", connection=REACHED, listeners=(), holders=()):
    """What a node says."""
    return RayFacts(version, mode, token, connection, list(listeners), list(holders))


def view(*nodes):
    """A cluster of nodes (host, address, alive)."""
    states = tuple(NodeState(host, address, alive, "gone") for host, address, alive in nodes)
    return ClusterView(HeadReply.cluster, "", "2.60.0", "3.11.7", states)


def judged(found, check):
    """(verdict, evidence) of a check's findings."""
    return [(one.verdict, one.evidence) for one in found if one.check == check]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.60.0", Verdict.ok),
        ("3.0.0rc1", Verdict.ok),
        ("2.9.3", Verdict.fail),
        ("", Verdict.fail),
    ],
)
def test_an_older_ray_than_the_package_asks_for_fails(version, verdict):
    (found,) = judge_versions({"a": facts(version)})
    assert found.verdict is verdict
    if verdict is Verdict.fail:
        assert "needs 2.60" in found.evidence and "pip install" in found.advice


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (facts(), facts(), Verdict.ok),
        (facts(), facts(mode="disabled"), Verdict.ok),
        (facts(), facts(mode="", token="aaaa"), Verdict.ok),
        (facts(mode="disabled", token="aaaa"), facts(mode="disabled"), Verdict.ok),
        (facts(token="aaaa"), facts(), Verdict.fail),
        (facts(token="aaaa"), facts(token="aaaa"), Verdict.fail),
        (facts(token="aaaa"), facts(token="bbbb"), Verdict.fail),
        (facts(token="aaaa"), facts(mode="disabled"), Verdict.fail),
        (facts(mode="token", token="aaaa"), facts(token="aaaa"), Verdict.fail),
        (facts(mode="token", token="aaaa"), facts(mode="token", token="aaaa"), Verdict.ok),
        (facts(mode="token", token="aaaa"), facts(mode="token", token="bbbb"), Verdict.fail),
        (facts(mode="token", token="aaaa"), facts(), Verdict.fail),
        (facts(mode="token", token="aaaa"), facts(mode="token"), Verdict.fail),
    ],
)
def test_a_head_must_not_ask_for_a_token_that_others_do_not_send(a, b, verdict):
    (found,) = judge_tokens({"a": a, "b": b}, joined=False)
    assert found.verdict is verdict


def test_a_token_without_the_mode_is_no_matter_alone_or_where_a_cluster_asks_for_none():
    nodes = {"a": facts(), "b": facts(token="aaaa")}
    for some, joined in (({"b": nodes["b"]}, False), (nodes, True)):
        (found,) = judge_tokens(some, joined=joined)
        assert found.verdict is Verdict.ok
        assert found.evidence == "RAY_AUTH_MODE unset, and a token on b"
    (found,) = judge_tokens(nodes, joined=False)
    assert found.evidence.startswith("RAY_AUTH_MODE unset, and a token on b: a head that")
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=" in found.advice


@pytest.mark.parametrize(
    ("value", "mode"), [(None, None), ("", ""), ("Token", "token"), ("disabled", "disabled")]
)
def test_the_mode_is_read_as_ray_does(monkeypatch, value, mode):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", value)
    assert ray_facts(None).auth_mode == mode


def test_a_head_on_all_addresses_is_no_loopback():
    found = judge_reachable({"a": facts(listeners=["::"]), "b": facts()}, ADDRESS, several=True)
    assert judged(found, "ray.loopback") == [(Verdict.ok, "port 6379 listens on a: ::")]


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("a100", False), ("cafe", False), ("[::1]", True), ("localhost", True)],
)
def test_names_of_hexadecimal_digits_are_no_addresses(host, is_loopback):
    found = judge_reachable({"a": facts(listeners=["::"])}, f"{host}:6379", several=True)
    verdict = Verdict.fail if is_loopback else Verdict.ok
    assert [one for one, _ in judged(found, "ray.loopback")] == [verdict]


def test_a_name_that_no_host_can_have_is_a_finding():
    assert connect(".ray.svc", 6379).problem == "no host has this name"


def test_enough_nodes_are_enough():
    found = judge_view(view(("a", "10.0.1.2", True), ("b", "10.0.1.3", True)), ADDRESS, 2)
    assert {one.verdict for one in found} == {Verdict.ok}


def test_a_dead_node_is_told_where_the_others_are_enough():
    nodes = [("a", "10.0.1.2", True), ("b", "10.0.1.3", True), ("c", "10.0.1.4", False)]
    ((verdict, evidence),) = judged(judge_view(view(*nodes), ADDRESS, 2), "ray.nodes")
    assert verdict is Verdict.warn and "dead: c (10.0.1.4): gone" in evidence


def test_a_node_that_came_back_is_not_dead():
    nodes = [("a", "10.0.1.2", True), ("a", "10.0.1.2", False)]
    assert judged(judge_view(view(*nodes), ADDRESS, 1), "ray.nodes")[0][0] is Verdict.ok


def test_nodes_of_one_machine_may_be_known_by_loopback():
    nodes = [("vm", "127.0.0.1", True), ("vm", "127.0.0.1", True)]
    assert judged(judge_view(view(*nodes), ADDRESS, 2), "ray.loopback") == []


def test_a_node_that_the_cluster_knows_by_a_name_fails(monkeypatch):
    """As of `ray start --node-ip-address=$(hostname)`; a run would order ranks by addresses."""
    found = judge_view(view(("a", "10.0.1.2", True), ("b", "node-b", True)), ADDRESS, 2)
    ((verdict, evidence),) = judged(found, "ray.loopback")
    assert verdict is Verdict.fail and "b is known in the cluster by node-b, a name" in evidence
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(runtime.compat, "cluster_address", str)
    monkeypatch.setattr(runtime.compat, "reload_authentication", lambda: None)
    monkeypatch.setattr(runtime.ray, "init", lambda **_: None)
    nodes = [{"NodeManagerAddress": name, "Alive": True} for name in ("10.0.1.2", "node-b")]
    monkeypatch.setattr(runtime.ray, "nodes", lambda: nodes)
    with pytest.raises(ConfigError, match="by names: node-b"), runtime.joined_cluster({}):
        pass


def test_what_speaks_grpc_and_is_no_head_is_named():
    found = judge_view(ClusterView(HeadReply.none, "no answer within 10 s"), ADDRESS, 2)
    ((verdict, evidence),) = judged(found, "ray.port")
    assert verdict is Verdict.fail and "no answer within 10 s" in evidence


@pytest.fixture
def no_ray():
    """A server that answers as Redis does."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"-ERR unknown command 'PRI'")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("listens", [True, False])
def test_what_is_no_cluster_is_not_waited_for(no_ray, monkeypatch, listens):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = no_ray if listens else closed.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    says = "not Ray: \"-ERR unknown command 'PRI'" if listens else "connection refused"
    start = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        RayProbes().__enter__()
    assert time.monotonic() - start < 3.0
    assert "no Ray cluster answers there" in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(("wanted", "verdict"), [(1, Verdict.skipped), (2, Verdict.fail)])
def test_other_nodes_are_not_taken_for_granted(monkeypatch, wanted, verdict):
    """Without an address of theirs nothing but this machine has been looked at."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = examine(LocalProbes("a"), wanted)
    (nodes,) = [one for one in found if one.check == "ray.nodes"]
    assert nodes.verdict is verdict
    if verdict is Verdict.fail:
        assert nodes.evidence == "1 of cluster.nodes=2 examined: RAY_ADDRESS is not set"
        assert "RAY_ADDRESS=" in nodes.advice and "--join" in nodes.advice
