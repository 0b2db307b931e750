"""What the stage network makes of invented facts of several nodes."""

import itertools

import pytest

from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network import nodes as network_nodes
from hybridrl.doctor.network import ports as network_ports
from hybridrl.doctor.network import speeds as network_speeds
from hybridrl.doctor.network.nodes import rank_zero_node
from hybridrl.doctor.network.server import Opened, Target
from hybridrl.doctor.network.speeds import Speed
from tests.support.network_cases import view

pytestmark = pytest.mark.full


def opened(
    rendezvous=29500, worker=19999, chosen=40000, problem="", holders=(), ephemeral=(32768, 60999)
):
    """What a node listens on."""
    return Opened("token", rendezvous, worker, chosen, problem, list(holders), ephemeral)


def verdicts(findings):
    """(node, verdict) of each."""
    return [(finding.node, finding.verdict) for finding in findings]


def test_rank_zero_is_on_the_lowest_address_as_numbers():
    assert rank_zero_node({"a": "10.0.0.10", "b": "10.0.0.9"}) == "b"


def test_a_node_known_by_a_loopback_address_fails():
    views = {"a": view(), "b": view("b", eth0="10.0.1.3/24")}
    _, found = network_nodes.judge(views, {"a": "10.0.1.2", "b": "127.0.1.1"}, "")
    assert (found.node, found.verdict) == ("b", Verdict.fail)
    assert "know b by 127.0.1.1" in found.evidence and "eth0 10.0.1.3/24" in found.evidence
    assert "--node-ip-address=10.0.1.3" in found.advice and "/etc/hosts" in found.advice


def test_nodes_of_one_machine_may_share_the_loopback_address():
    views = {"vm (1)": view("vm"), "vm (2)": view("vm")}
    found = network_nodes.judge(views, dict.fromkeys(views, "127.0.0.1"), "")
    assert {finding.verdict for finding in found} == {Verdict.ok}


def test_an_address_that_no_interface_has_is_nat():
    views = {"a": view(), "b": view("b", eth0="172.17.0.2/16")}
    _, found = network_nodes.judge(views, {"a": "10.0.1.2", "b": "10.0.1.3"}, "")
    assert found.verdict is Verdict.warn and "172.17.0.2/16" in found.evidence
    assert "--network=host" in found.advice


def test_a_master_address_that_nodes_take_for_different_ones_fails():
    masters = {"a": "10.0.1.2", "b": "10.0.1.2", "c": "10.9.9.9"}
    views = {node: view(node, master=[address]) for node, address in masters.items()}
    addresses = {"a": "10.0.1.2", "b": "10.0.1.3", "c": "10.0.1.4"}
    found = network_nodes.judge(views, addresses, "head")[-1]
    assert found.verdict is Verdict.fail
    assert "10.0.1.2 on b, 10.9.9.9 on c" in found.evidence
    assert "export MASTER_ADDR=10.0.1.2" in found.advice


def test_rank_zeros_node_may_take_its_own_name_for_loopback():
    views = {"a": view(master=["127.0.1.1"]), "b": view("b", master=["10.0.1.2"])}
    found = network_nodes.judge(views, {"a": "10.0.1.2", "b": "10.0.1.3"}, "a")[-1]
    assert found.verdict is Verdict.ok and "10.0.1.2" in found.evidence


def test_one_node_may_have_any_name_of_its_own_as_master_address():
    alone = {"a": view(master=["127.0.1.1"])}
    found = network_nodes.judge(alone, {"a": "127.0.0.1"}, "a")[-1]
    assert found.verdict is Verdict.ok


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^eth", ["ib0", "lo"]),
        ("^=eth1", ["eth0", "ib0", "lo"]),
        ("ib,eth1", ["eth1", "ib0"]),
    ],
)
def test_interface_patterns_are_nccls(spec, expected):
    assert network_nodes.matching(spec, ["eth0", "eth1", "ib0", "lo"]) == expected


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        ({"docker0": "172.17.0.1/16"}, "eth0"),
        ({"ib0": "10.1.0.1/24"}, "ib0"),
        ({}, "eth0"),
    ],
)
def test_the_interface_that_nccl_takes(interfaces, expected):
    assert network_nodes.nccl_choice(view(**interfaces)) == expected


def test_the_interfaces_of_each_library_are_told():
    views = {"a": view(), "b": view("b", eth0="10.0.1.3/24", docker0="172.17.0.1/16")}
    views["b"].variables["GLOO_SOCKET_IFNAME"] = "eth0"
    (found,) = network_ports.judge_interfaces(views)
    assert found.verdict is Verdict.ok
    assert found.evidence.startswith("NCCL uses a eth0, b eth0; gloo uses b eth0; a: eth0 10.0.1.2")


def judge_attempts(variables, problems):
    """The findings where a and c try b's ib0, which NCCL uses there."""
    views = {node: view(node, eth0=f"10.0.1.{k}/24") for k, node in enumerate("abc", 2)}
    views["b"] = view("b", eth0="10.0.1.3/24", ib0="10.9.0.3/24", variables=variables)
    (choice,) = network_nodes.choices_of("b", views["b"])
    assert (choice.interface, choice.address) == ("ib0", "10.9.0.3")
    target = Target("b", choice.address, 40000, "token", choice=choice)
    tried = [network_ports.Attempt(node, target, problems[node]) for node in problems]
    addresses = {"a": "10.0.1.2", "b": "10.0.1.3", "c": "10.0.1.4"}
    return network_ports.judge_interfaces(views, tried, addresses)


@pytest.mark.parametrize(
    ("variables", "verdict", "says"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib"}, Verdict.fail, "NCCL_SOCKET_IFNAME=ib: ib0 of b"),
        ({}, Verdict.warn, "NCCL uses ib0 by default: ib0 of b"),
    ],
)
def test_an_interface_that_nobody_reaches_fails_where_it_is_named(variables, verdict, says):
    (found,) = judge_attempts(variables, {"a": "no route", "c": "refused"})
    assert (found.node, found.verdict) == ("b", verdict)
    assert f"{says} is not reached at 10.9.0.3 from a: no route; from c: refused" in found.evidence
    assert "export NCCL_SOCKET_IFNAME=eth0" in found.advice


def test_an_interface_that_one_node_does_not_reach_is_told_of_the_pair():
    (found,) = judge_attempts({"NCCL_SOCKET_IFNAME": "ib"}, {"a": "", "c": "no route"})
    assert (found.node, found.verdict) == ("c -> b", Verdict.fail)


def test_addresses_that_clouds_route_have_no_subnet_to_compare():
    views = {"a": view(eth0="10.0.1.2/32"), "b": view("b", eth0="10.0.9.3/32")}
    (found,) = network_ports.judge_interfaces(views)
    assert found.verdict is Verdict.ok


def test_many_broken_pairs_are_counted():
    nodes = [f"n{k}" for k in range(6)]
    attempts = [
        network_ports.Attempt(a, Target(b, "10.0.0.1", 29500, "token"), "refused")
        for a, b in itertools.permutations(nodes, 2)
    ]
    found = network_ports.judge(
        attempts, {node: opened() for node in nodes}, dict.fromkeys(nodes, "10.0.0.1")
    )
    assert len(found) == network_ports.MAX_SHOWN + 1
    assert "and 10 more pairs" in found[-1].evidence


@pytest.mark.parametrize("given", [None, 40000])
def test_a_port_that_the_kernel_may_give_away_is_a_warning(given):
    ports = range(40000, 40100) if given is None else range(40000, 40001)
    wanted = (40000, 40099)
    found = network_ports.judge_rendezvous("a", opened(40000), wanted, ports, given)
    assert found.verdict is Verdict.warn and "ip_local_port_range (32768 to" in found.evidence
    assert "ip_local_reserved_ports" in found.advice


@pytest.mark.parametrize("count", range(2, 10))
def test_a_tournament_pairs_each_two_nodes_once_and_nobody_twice_a_round(count):
    nodes = [str(k) for k in range(count)]
    rounds = network_speeds.tournament(nodes)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, itertools.combinations(nodes, 2)))
    for pairs in rounds:
        players = [node for pair in pairs for node in pair]
        assert len(set(players)) == len(players)
    assert len(rounds) == count - 1 + count % 2


def speeds(**slow):
    """Pairs of three nodes at 1 GB/s, but for these: a_b=0.4."""
    return {
        (a, b): Speed(1e-4, 1e9 * slow.get(f"{a}_{b}", 1.0))
        for a, b in itertools.permutations("abc", 2)
    }


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ({}, [("all", Verdict.ok)]),
        ({"a_b": 0.6}, [("all", Verdict.ok)]),
        ({"a_b": 0.4}, [("a -> b", Verdict.warn)]),
        ({"a_b": 0.09}, [("a -> b", Verdict.fail)]),
        ({"a_b": 0.4, "c_a": 0.05}, [("c -> a", Verdict.fail), ("a -> b", Verdict.warn)]),
    ],
)
def test_pairs_are_held_against_the_median(slow, expected):
    assert verdicts(network_speeds.judge_bandwidth(speeds(**slow))) == expected


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(0.9e-3, Verdict.ok), (3e-3, Verdict.warn), (30e-3, Verdict.fail)],
)
def test_round_trips_are_held_against_the_median(seconds, verdict):
    some = speeds() | {("a", "b"): Speed(seconds, 1e9)}
    (found,) = network_speeds.judge_bandwidth(some)
    assert found.verdict is verdict
    if verdict is not Verdict.ok:
        assert found.node == "a -> b"
        assert f"round trip {1e3 * seconds:.3f} ms, a -> b; the median" in found.evidence
        assert "round trip 0.100 ms" in found.evidence.partition("median")[2]


@pytest.mark.parametrize("slow", [{}, {"c_a": 0.4}])
def test_every_pair_is_handed_to_the_report(slow):
    first, *_ = network_speeds.judge_bandwidth(speeds(**slow))
    (matrix,) = first.tables.values()
    assert {(a, b) for a, row in matrix.items() for b in row} == set(speeds())
    assert matrix["a"]["b"] == {"bytes_per_s": 1e9, "round_trip_s": 1e-4}
    assert matrix["c"]["a"]["bytes_per_s"] == 1e9 * slow.get("c_a", 1.0)


def test_with_two_nodes_the_slower_way_is_held_against_the_faster():
    two = {("a", "b"): Speed(1e-4, 1e9), ("b", "a"): Speed(1e-4, 0.3e9)}
    assert verdicts(network_speeds.judge_bandwidth(two)) == [("b -> a", Verdict.warn)]


def test_pairs_that_are_all_slow_are_told():
    two = dict.fromkeys([("a", "b"), ("b", "a")], Speed(1e-4, 11e6))
    assert {finding.verdict for finding in network_speeds.judge_bandwidth(two)} == {Verdict.warn}
