"""Faults on the way to Ray's head between hosts, namespaces here: check id and advice of each.

What answers as the head is a server of the tests, where nothing but Ray's absence is at stake;
Ray itself, on two more hosts, where it is.
"""

import subprocess
import sys
from contextlib import contextmanager

import pytest

from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.ray import examine
from tests.support.namespace_agents import driver, network_over_ray, only, set_environments
from tests.support.namespaces import bench, need_namespaces

# Where Ray's managers listen.
SERVICES = ["--node-manager-port=6380", "--object-manager-port=6381"]
# Answers as Redis does to what is no command of its own.
REDIS = """
import socketserver, sys

class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"-ERR unknown command 'PRI'\\r\\n")

socketserver.ThreadingTCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer((sys.argv[1], 6379), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Environments with a home that has a token, as a `ray.init()` leaves it, and with an empty."""
    folder = tmp_path_factory.mktemp("homes")
    for name in ("one", "none"):
        (folder / name / ".ray").mkdir(parents=True)
    (folder / "one" / ".ray" / "auth_token").write_text("c" * 64)
    return {"HOME": str(folder / "one")}, {"HOME": str(folder / "none")}


@pytest.fixture(scope="module", autouse=True)
def no_mode():
    """RAY_AUTH_MODE is not set, nor a token."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def hosts(homes):
    """Two hosts without a token, whatever the home of these tests has."""
    need_namespaces()
    with bench("10.79.1.2/24", "10.79.2.2/24") as made:
        for host in made:
            host.environment |= homes[1]
        yield made


@pytest.fixture(scope="module")
def head(hosts):
    """The doctor on both hosts, before Ray, with RAY_ADDRESS set."""
    with driver(hosts) as made:
        address = f"{hosts[0].address}:6379"
        made.call(set_environments, {hosts[0].name: {"RAY_ADDRESS": address}})
        yield made


@contextmanager
def redis(host, address):
    """Something on Ray's port that is not Ray."""
    process = host.start(*(sys.executable, "-c", REDIS, address), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "listening\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def failures(findings):
    """(check, node) of what failed, in order."""
    return sorted((f.check, f.node) for f in findings if f.verdict is Verdict.fail)


def test_a_head_that_is_not_there_is_refused_and_told_how_to_start(head, hosts):
    findings = head.call(examine, 2)
    assert failures(findings) == [("ray.reachable", host.name) for host in hosts]
    found = only(findings, "ray.reachable", hosts[1].name)
    assert "10.79.1.2:6379: connection refused" in found.evidence
    assert "ray start --head --node-ip-address" in found.advice and "ss -ltn" in found.advice
    assert only(findings, "ray.nodes").verdict is Verdict.skipped


def test_a_port_of_another_program_is_no_ray(head, hosts):
    with redis(hosts[0], "0.0.0.0") as process:
        findings = head.call(examine, 2)
    assert failures(findings) == [("ray.port", "all")]
    found = only(findings, "ray.port")
    assert "no Ray" in found.evidence and "-ERR unknown command" in found.evidence
    assert f"(pid {process.pid})" in found.evidence
    assert "--port=6380" in found.advice


def test_a_head_on_loopback_alone_is_named(head, hosts):
    with redis(hosts[0], "127.0.0.1"):
        findings = head.call(examine, 2)
    assert ("ray.loopback", hosts[0].name) in failures(findings)
    found = only(findings, "ray.loopback")
    assert "port 6379 listens on 127.0.0.1 alone" in found.evidence
    assert "--node-ip-address" in found.advice and "127.0.1.1 in /etc/hosts" in found.advice
    assert only(findings, "ray.reachable", hosts[1].name).verdict is Verdict.fail


def test_a_loopback_address_leads_nowhere_with_several_nodes(head, hosts):
    head.call(set_environments, {hosts[0].name: {"RAY_ADDRESS": "127.0.0.1:6379"}})
    try:
        found = only(head.call(examine, 2), "ray.loopback")
    finally:
        address = f"{hosts[0].address}:6379"
        head.call(set_environments, {hosts[0].name: {"RAY_ADDRESS": address}})
    assert found.verdict is Verdict.fail and "leads every node to itself" in found.evidence


def test_a_blocked_port_of_ray_is_told_from_one_that_nobody_has(head, hosts):
    first, other = hosts
    with redis(first, "0.0.0.0"), first.unreachable_from(other, "6379"):
        findings = head.call(examine, 2)
    assert failures(findings) == [("ray.reachable", other.name)]
    found = only(findings, "ray.reachable", other.name)
    assert "no answer within 3 s" in found.evidence and "Open TCP port 6379" in found.advice


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}, "the nodes differ"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere"}, "and no token on"),
    ],
)
def test_tokens_that_differ_or_are_missing_are_named(head, hosts, settings, says):
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    by_host = {hosts[0].name: ours, hosts[1].name: settings}
    head.call(set_environments, by_host)
    try:
        found = only(head.call(examine, 2), "ray.token")
    finally:
        head.call(set_environments, {h: dict.fromkeys(v) for h, v in by_host.items()})
    assert found.verdict is Verdict.fail and says in found.evidence
    assert hosts[1].name in found.evidence
    assert "aaaa" not in found.evidence and "RAY_AUTH_TOKEN=" in found.advice


def test_a_token_that_a_head_finds_by_itself_is_foretold(head, hosts, homes):
    """The mode is set nowhere: the head would ask for its token, the other would send none."""
    first = hosts[0].name
    head.call(set_environments, {first: homes[0]})
    try:
        found = only(head.call(examine, 2), "ray.token")
    finally:
        head.call(set_environments, {first: homes[1]})
    assert found.verdict is Verdict.fail
    assert f"RAY_AUTH_MODE unset, and a token on {first}: a head" in found.evidence
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=" in found.advice


def test_a_head_that_registers_a_loopback_address_is_named(hosts, tmp_path):
    first, other = hosts
    options = ["--head", "--port=6390", "--node-ip-address=127.0.1.1"]
    first.start_ray(tmp_path / "head.log", *options, "--include-dashboard=false")
    environment = {"RAY_ADDRESS": f"{first.address}:6390"}
    findings = other.call(examine, LocalProbes(other.name), 2, env=environment)
    first.kill_all()
    assert ("ray.loopback", first.name) in failures(findings)
    found = only(findings, "ray.loopback", first.name)
    assert "known in the cluster by 127.0.1.1" in found.evidence
    assert "--node-ip-address" in found.advice
    nodes = only(findings, "ray.nodes")
    assert nodes.verdict is Verdict.fail and "1 of cluster.nodes=2 alive" in nodes.evidence


@pytest.fixture(scope="module")
def token_head(homes, tmp_path_factory):
    """Two hosts, Ray's head on the first, in whose home is a token."""
    need_namespaces()
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with bench("10.76.1.2/24", "10.76.2.2/24") as made:
        place = [f"--node-ip-address={made[0].address}", "--port=6379", *SERVICES]
        made[0].start_ray(log, "--head", *place, "--include-dashboard=false", **homes[0])
        yield made


@pytest.mark.parametrize("with_token", [True, False])
def test_such_a_head_refuses_who_has_not_set_the_mode(token_head, homes, with_token, tmp_path):
    """What is foretold is what Ray does, even to a node that has the same token in its home."""
    first, other = token_head
    home = homes[0] if with_token else homes[1]
    place = [f"--address={first.address}:6379", f"--node-ip-address={other.address}"]
    with pytest.raises(AssertionError, match="Authentication token is missing or incorrect"):
        # Ray would try twenty times, once a second.
        other.start_ray(tmp_path / "log", *place, RAY_NUM_REDIS_GET_RETRIES="1", **home)


def test_a_blocked_object_manager_of_a_ray_that_runs_is_named(token_head, homes, tmp_path):
    """The cluster stands, as its nodes are told the mode; a batch could not pass."""
    first, other = token_head
    environment = homes[0] | {"RAY_AUTH_MODE": "token"}
    address = f"{first.address}:6379"
    place = [f"--address={address}", f"--node-ip-address={other.address}", *SERVICES]
    other.start_ray(tmp_path / "log", *place, **environment)
    with first.unreachable_from(other, "6381"):
        joined = environment | {"RAY_ADDRESS": address}
        findings = first.call(network_over_ray, [29500, 29599], env=joined)
    pair = f"{other.name} -> {first.name}"
    assert failures(findings) == [("network.ports", pair)]
    found = only(findings, "network.ports", pair)
    path = f"{other.address} -> {first.address} port 6381 (Ray's object manager)"
    assert f"{path}: no answer within 3 s" in found.evidence
    assert "in this direction alone" in found.evidence and "6380" not in found.evidence
    assert f"open these ports on {first.name}" in found.advice
