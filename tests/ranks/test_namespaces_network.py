"""Faults of a network between real hosts, namespaces here: each has its check id and its advice."""

import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network.stage import examine
from tests.support.namespace_agents import driver, only, set_environments, stage_of_two, summed
from tests.support.namespaces import bench, need_namespaces, second_interfaces, write_hosts

BAND = [29500, 29503]
SERVE = "import sys; from hybridrl.doctor.joined import serve; serve(sys.argv[1], 0.7)"
HOLD = """
import socket, sys
held = [socket.create_server(("0.0.0.0", int(port))) for port in sys.argv[1:]]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def hosts():
    need_namespaces()
    with bench("10.77.1.2/24", "10.77.1.3/24", "10.77.2.2/24") as made:
        yield made


@pytest.fixture(scope="module")
def head(hosts):
    """The head of the doctor's processes on all hosts."""
    with driver(hosts) as made:
        yield made


def stage(head, *, quick=True):
    """The findings of the stage network."""
    return head.call(examine, BAND, on_gpu=False, quick=quick)


def failures(findings):
    """(check, node) of what failed."""
    return [(f.check, f.node) for f in findings if f.verdict is Verdict.fail]


@contextmanager
def environment(head, **by_host):
    """Variables of the hosts' processes, taken back at the end."""
    by_host = {name.replace("_", "-"): values for name, values in by_host.items()}
    head.call(set_environments, by_host)
    try:
        yield
    finally:
        unset = {name: dict.fromkeys(values) for name, values in by_host.items()}
        head.call(set_environments, unset)


def setting(head, host, **values):
    """Variables of one host's process."""
    return environment(head, **{host.name.replace("-", "_"): values})


def test_a_sound_network_has_no_failure(head, hosts):
    findings = stage(head, quick=False)
    assert failures(findings) == []
    assert "3 nodes: 66 connections" in only(findings, "network.ports").evidence
    bandwidth = only(findings, "network.bandwidth")
    assert "6 pairs: median" in bandwidth.evidence
    collective = only(findings, "network.collective")
    assert "3 ranks, 3 node(s): gloo" in collective.evidence
    names = {host.name for host in hosts}
    assert {a: set(row) for a, row in bandwidth.tables["one TCP stream"].items()} == {
        name: names - {name} for name in names
    }
    address = only(findings, "network.address", hosts[2].name)
    assert hosts[2].address in address.evidence
    used = only(findings, "network.interfaces")
    each = ", ".join(f"{host.name} eth0" for host in hosts)
    assert used.verdict is Verdict.ok and f"NCCL uses {each}" in used.evidence


@pytest.fixture(scope="module")
def blocked(head, hosts):
    """Findings with the rendezvous port blocked between two hosts, other ports between others."""
    first, second, last = hosts
    # The firewall drops connections one way, and the other way's answers.
    with (
        first.unreachable_from(last, "29500"),
        first.unreachable_from(second, "10002-19399"),
        first.unreachable_from(second, "19401-19999"),
        second.unreachable_from(first, "6380-6385"),
        last.firewall_to(second, "32768-60999"),
    ):
        return stage(head)


def test_a_blocked_rendezvous_port_is_named_with_its_direction(blocked, hosts):
    first, _, last = hosts
    pair = f"{last.name} -> {first.name}"
    assert ("network.ports", f"{first.name} -> {last.name}") not in failures(blocked)
    found = only(blocked, "network.ports", pair)
    assert found.verdict is Verdict.fail
    assert f"{last.address} -> {first.address} port 29500: no answer within 3 s" in found.evidence
    assert "in this direction alone" in found.evidence
    assert "cluster.rendezvous_ports" in found.advice and "firewall" in found.advice


def test_blocked_kernel_chosen_ports_are_named_in_both_directions(blocked, hosts):
    _, second, last = hosts
    for a, b in ((second, last), (last, second)):
        found = only(blocked, "network.ports", f"{a.name} -> {b.name}")
        assert found.verdict is Verdict.fail
        assert "no answer within 3 s" in found.evidence and "29500" not in found.evidence
        assert "in both directions" in found.evidence
        assert "open all TCP ports" in found.advice and "32768 to 60999" in found.advice


def test_blocked_ports_of_rays_workers_are_named(blocked, hosts):
    first, second, _ = hosts
    found = only(blocked, "network.ports", f"{second.name} -> {first.name}")
    assert found.verdict is Verdict.fail and "port 19999: no answer" in found.evidence
    assert "10002 to 19999" in found.advice and "--min-worker-port" in found.advice


def test_blocked_ports_of_rays_services_are_named(blocked, hosts):
    first, second, _ = hosts
    found = only(blocked, "network.ports", f"{first.name} -> {second.name}")
    assert found.verdict is Verdict.fail and "port 6380: no answer" in found.evidence
    assert "6379 to 6386" in found.advice and "HYBRIDRL_RAY_PORT" in found.advice


def test_a_nodes_own_rule_against_connections_is_told_from_others(head, hosts):
    _, second, last = hosts
    with last.unreachable_from(second, "32768-60999"):
        findings = stage(head)
    found = only(findings, "network.ports", f"{last.name} -> {second.name}")
    assert found.verdict is Verdict.fail
    assert "the node's own `ip rule` or `ip route` discards" in found.evidence


def test_a_missing_route_is_told_from_a_firewall(head, hosts):
    _, second, last = hosts
    with last.unroutable(second):
        findings = stage(head)
    found = only(findings, "network.ports", f"{last.name} -> {second.name}")
    assert found.verdict is Verdict.fail and "no route" in found.evidence
    assert f"ip route get {second.address}" in found.advice


def test_a_slow_link_is_named_against_the_median(head, hosts):
    first, second, last = hosts
    with last.slow_link("80mbit"):
        findings = stage(head, quick=False)
    slow = [("network.bandwidth", f"{last.name} -> {other.name}") for other in (first, second)]
    assert sorted(failures(findings)) == slow
    found = only(findings, *slow[0])
    assert 5 < float(found.evidence.split("MB/s")[0]) < 15
    (tables,) = [f.tables for f in findings if f.tables]
    speeds = [speed for row in tables["one TCP stream"].values() for speed in row.values()]
    rates = [speed["bytes_per_s"] for speed in speeds]
    assert statistics.median_high(rates) > 100e6
    assert "ethtool" in found.advice and "tc qdisc" in found.advice
    assert "3 ranks, 3 node(s): gloo" in only(findings, "network.collective").evidence


@pytest.mark.slow
def test_a_network_that_drops_large_packets_is_named(head, hosts):
    """As tunnels between hosts whose interfaces do not know of their smaller MTU."""
    last = hosts[2]
    with last.small_packets(1000):
        findings = stage(head, quick=False)
    (found,) = [f for f in findings if f.check == "network.bandwidth"]
    assert found.verdict is Verdict.fail and last.name in found.node.split(" -> ")
    assert "gloo: rank " in found.evidence and "ping -M do" in found.advice
    assert only(findings, "network.collective").verdict is Verdict.skipped


def test_a_sick_spare_node_warns_and_the_others_are_measured_without_it(head, hosts):
    """The run is on two of the three nodes, and nobody reaches the last one."""
    first, second, last = hosts
    with last.unreachable_from(first, "19401-29599"), last.unreachable_from(second, "19401-60999"):
        findings = head.call(stage_of_two, (), quick=False)
    assert failures(findings) == []
    found = only(findings, "network.ports", f"{first.name} -> {last.name}")
    assert found.verdict is Verdict.warn
    assert f"the run fits without {last.name}" in found.evidence
    assert "2 pairs: median" in only(findings, "network.bandwidth").evidence
    assert "2 ranks, 2 node(s): gloo" in only(findings, "network.collective").evidence


def test_a_node_to_which_no_rank_comes_is_left_alone(head, hosts):
    """As a head without GPUs, which would have the lowest address."""
    findings = head.call(stage_of_two, (hosts[0].name,), quick=True)
    assert only(findings, "network.rendezvous").node == hosts[1].name
    assert hosts[0].name not in {finding.node for finding in findings}
    assert "2 nodes: " in only(findings, "network.ports").evidence


def test_a_rank_that_cannot_join_is_named(hosts):
    name = hosts[0].name
    findings = hosts[0].call(summed, LocalProbes(name), env={"GLOO_SOCKET_IFNAME": "nowhere0"})
    found = only(findings, "network.collective", name)
    assert found.verdict is Verdict.fail
    assert "forming the process group" in found.evidence and "nowhere0" in found.evidence
    assert "GLOO_SOCKET_IFNAME" in found.advice


@contextmanager
def holding(host, *ports):
    """A process on a host that listens on these ports."""
    process = host.start(
        sys.executable,
        "-c",
        HOLD,
        *map(str, ports),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.communicate(timeout=10)


def test_a_taken_port_is_passed_over_and_its_holder_named(head, hosts):
    with holding(hosts[0], 29500) as process:
        found = only(stage(head), "network.rendezvous")
    assert found.verdict is Verdict.ok and found.node == hosts[0].name
    assert "port 29501 is free" in found.evidence
    assert f"(pid {process.pid}) holds 29500" in found.evidence


def test_a_band_without_a_free_port_fails_with_the_holders(head, hosts):
    with holding(hosts[0], *range(29500, 29504)) as process:
        findings = stage(head)
    assert failures(findings) == [("network.rendezvous", hosts[0].name)]
    found = only(findings, "network.rendezvous")
    assert "ports 29500 to 29503 are in use" in found.evidence
    assert f"(pid {process.pid}) holds 29503" in found.evidence
    assert "cluster.rendezvous_ports=[first,last]" in found.advice


def test_a_given_port_that_is_taken_is_named(head, hosts):
    with setting(head, hosts[0], MASTER_PORT="29500"), holding(hosts[0], 29500):
        found = only(stage(head), "network.rendezvous")
    assert found.verdict is Verdict.fail and "port 29500 is in use" in found.evidence
    assert "Unset MASTER_PORT" in found.advice


def test_a_band_among_the_kernels_ports_moves(head, hosts):
    hosts[0].run("sh", "-c", "echo 20000 60999 > /proc/sys/net/ipv4/ip_local_port_range")
    try:
        found = only(stage(head), "network.rendezvous")
    finally:
        hosts[0].run("sh", "-c", "echo 32768 60999 > /proc/sys/net/ipv4/ip_local_port_range")
    assert found.verdict is Verdict.ok and "port 19996 is free" in found.evidence
    assert "ip_local_port_range is 20000 to 60999" in found.evidence


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("last", "which belongs to"),
        ("127.0.0.1", "which leads each node to itself"),
        ("10.77.9.9", "belongs to none of the nodes"),
        ("no-such-host.invalid", "is unknown on"),
    ],
)
def test_a_wrong_master_address_is_named(head, hosts, value, says):
    first, _, last = hosts
    with setting(head, first, MASTER_ADDR=last.name if value == "last" else value):
        findings = stage(head)
    found = only(findings, "network.address", "all")
    assert found.verdict is Verdict.fail and says in found.evidence
    assert f"export MASTER_ADDR={first.address}" in found.advice


def test_the_master_address_of_rank_zero_is_right(head, hosts):
    with setting(head, hosts[0], MASTER_ADDR=hosts[0].name):
        found = only(stage(head), "network.address", "all")
    assert found.verdict is Verdict.ok and hosts[0].address in found.evidence


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize("value", ["ib0", "lo"])
def test_an_interface_that_leads_nowhere_is_named(head, hosts, name, value):
    with setting(head, hosts[1], **{name: value}):
        findings = stage(head)
    assert failures(findings) == [("network.interfaces", hosts[1].name)]
    found = only(findings, "network.interfaces")
    assert f"{name}={value}" in found.evidence and "eth0 10.77.1.3/24" in found.evidence
    assert f"export {name}=eth0" in found.advice


OWN_NETS = ("10.99.1.1/24", "10.99.2.1/24", "10.99.3.1/24")
ONE_NET = ("10.99.0.1/24", "10.99.0.2/24", "10.99.0.3/24")
# As the networks of management controllers on their hosts.
ONE_ADDRESS = ("10.99.0.1/24",) * 3


def everywhere(head, hosts, **values):
    """Variables of all hosts' processes."""
    return environment(head, **{host.name.replace("-", "_"): values for host in hosts})


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
@pytest.mark.parametrize("addresses", [OWN_NETS, ONE_ADDRESS], ids=["own nets", "one address"])
def test_a_named_interface_in_a_net_of_each_nodes_own_is_named(head, hosts, name, addresses):
    with second_interfaces(hosts, *addresses), everywhere(head, hosts, **{name: "eth1"}):
        findings = stage(head)
    # In the order in which the nodes have joined.
    assert sorted(failures(findings)) == [("network.interfaces", host.name) for host in hosts]
    found = only(findings, "network.interfaces", hosts[1].name)
    assert f"{name}=eth1: eth1 of {hosts[1].name} is not reached at" in found.evidence
    assert f"{addresses[1][:-3]} from {hosts[0].name}, {hosts[2].name}: " in found.evidence
    assert f"export {name}=eth0" in found.advice


def test_a_named_interface_in_a_net_that_all_share_is_sound(head, hosts):
    names = dict.fromkeys(["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"], "eth1")
    with second_interfaces(hosts, *ONE_NET), everywhere(head, hosts, **names):
        findings = stage(head)
    assert failures(findings) == []
    found = only(findings, "network.interfaces")
    assert found.verdict is Verdict.ok
    assert f"NCCL uses {', '.join(f'{host.name} eth1' for host in hosts)}" in found.evidence
    assert f"gloo uses {hosts[0].name} eth1" in found.evidence
    assert "12 connections to interfaces of their own" in found.evidence


def test_loopback_that_is_not_excluded_comes_first_for_nccl(head, hosts):
    with setting(head, hosts[1], NCCL_SOCKET_IFNAME="^docker"):
        findings = stage(head)
    assert failures(findings) == [("network.interfaces", hosts[1].name)]
    found = only(findings, "network.interfaces")
    assert f"lo of {hosts[1].name} is not reached at 127.0.0.1" in found.evidence
    assert "export NCCL_SOCKET_IFNAME=eth0" in found.advice


def test_an_interface_that_one_node_alone_names_wrongly_is_its_own_failure(head, hosts):
    with (
        second_interfaces(hosts, *OWN_NETS),
        setting(head, hosts[2], GLOO_SOCKET_IFNAME="eth1"),
    ):
        findings = stage(head, quick=False)
    assert failures(findings) == [("network.interfaces", hosts[2].name)]
    assert only(findings, "network.collective").verdict is Verdict.skipped


def test_a_named_interface_that_one_node_does_not_reach_is_told_of_the_pair(head, hosts):
    first, second, last = hosts
    with (
        second_interfaces(hosts, *ONE_NET[:2], "10.99.1.1/24"),
        setting(head, first, GLOO_SOCKET_IFNAME="eth1"),
    ):
        findings = stage(head)
    assert failures(findings) == [("network.interfaces", f"{last.name} -> {first.name}")]
    found = only(findings, "network.interfaces")
    assert "GLOO_SOCKET_IFNAME=eth1" in found.evidence and second.name not in found.evidence
    assert f"10.99.0.1 from {last.name}: no route" in found.evidence


def test_a_node_that_cannot_reach_the_head_says_why(hosts):
    first, _, last = hosts
    place = f"{first.address}:19401"
    command = [sys.executable, "-c", SERVE, place]
    for fault, says in (
        (first.unreachable_from(last, "19401"), "timed out"),
        (last.without_route(), "Network is unreachable"),
        (ExitStack(), "Connection refused"),
    ):
        with fault:
            key = {"HYBRIDRL_DOCTOR_KEY": "a" * 64}
            process = last.start(*command, env=key, stderr=subprocess.PIPE, text=True)
            _, error = process.communicate(timeout=20)
        assert f"cannot reach the head at {place}" in error and says in error


def test_a_head_that_takes_its_name_for_loopback_is_told(hosts):
    first, second, _ = hosts
    write_hosts(first, f"127.0.1.1 {first.name}\n")
    code = "import sys; from hybridrl.doctor.joined import *; joined_probes(*sys.argv[1:], 2, 1)"
    process = first.start(
        *(sys.executable, "-c", f"{code}.__enter__()", f"{first.name}:19402"),
        stderr=subprocess.PIPE,
        text=True,
    )
    _, error = process.communicate(timeout=20)
    assert "the name resolves to 127.0.1.1" in error and "Give an IP address" in error
    assert second.name not in error
