"""The doctor's collectives: their plan, real ranks that fail or hang, and what results mean."""

import os

import pytest

from hybridrl.config.planner.multicast import SWITCHES
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network import ports as network_ports
from hybridrl.doctor.network import ranks as network_ranks
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.network.ranks import RankResult
from hybridrl.doctor.network.speeds import BANDWIDTH, COLLECTIVE, rounds_between, rounds_within
from tests.support.host_cases import case, the
from tests.support.network_cases import view

pytestmark = pytest.mark.full


def run_rank(**changes):
    """The findings about one real rank of two on this machine; the other never comes."""
    alone = {"a": view(eth0="127.0.0.1/8")}
    port = network_ranks.open_meeting("127.0.0.1")
    planned = network_ranks.plan(["a"], {"a": 1}, {"a": "127.0.0.1"}, port, alone, on_gpu=False)
    order = planned["a"][0]._replace(**changes)
    return collective({"a": network_ranks.run_ranks([order])})


def collective(results):
    """The findings of network.collective."""
    return [f for f in network_ranks.judge(results) if f.check == COLLECTIVE]


def test_a_rank_that_fails_in_nccl_is_told_what_to_try():
    """No machine has a GPU 99."""
    (found,) = run_rank(device=99)
    assert (found.node, found.verdict) == ("a", Verdict.fail)
    assert "rank 0, starting NCCL on GPU 99: " in found.evidence
    assert "NCCL_DEBUG=INFO" in found.advice and "NCCL_IB_DISABLE=1" in found.advice


def test_a_rank_that_waits_for_others_in_vain_says_so():
    (found,) = run_rank(world_size=2, meet_s=0.5)
    assert found.verdict is Verdict.fail
    assert "rank 0, waiting for the other ranks at the store: " in found.evidence
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_a_rank_that_hangs_is_killed_at_its_limit():
    (found,) = run_rank(limit_s=0.0, meet_s=0.0)
    assert found.verdict is Verdict.fail
    assert "killed after 0 s" in found.evidence


def test_pairs_get_time_of_their_own():
    nodes = [f"n{k}" for k in range(16)]
    orders = network_ranks.plan(
        nodes,
        dict.fromkeys(nodes, 8),
        dict.fromkeys(nodes, "10.0.1.2"),
        1234,
        dict.fromkeys(nodes, view()),
        on_gpu=True,
    )
    order = orders["n3"][0]
    assert len(rounds_within(order.nodes)) == 2 * 7
    assert len(rounds_between(order.nodes)) == 2 * 15
    assert order.limit_s == network_ranks.RANKS_S + (14 + 2 * 30) * network_ranks.ROUND_S


def test_ranks_are_dealt_node_by_node_from_rank_zeros_node():
    views = {"a": view(eth0="10.0.1.9/24"), "b": view("b", eth0="10.0.1.3/24")}
    addresses = {"a": "10.0.1.9", "b": "10.0.1.3"}
    orders = network_ranks.plan(["b", "a"], {"a": 2, "b": 3}, addresses, 1234, views, on_gpu=True)
    assert [(order.rank, order.device) for order in orders["b"]] == [(0, 0), (1, 1), (2, 2)]
    assert [(order.rank, order.device) for order in orders["a"]] == [(3, 0), (4, 1)]
    assert {order.nodes for order in orders["a"] + orders["b"]} == {((0, 1, 2), (3, 4))}
    nodes = orders["a"][0].nodes
    rounds = rounds_within(nodes) + rounds_between(nodes)
    pairs = [frozenset(pair) for way in rounds for pair in way]
    assert sorted(map(sorted, pairs)) == sorted([[0, 1], [0, 2], [1, 2], [3, 4], [0, 3]] * 2)
    for way in rounds:
        ranks = [rank for pair in way for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert {order.address for order in orders["a"]} == {"10.0.1.3"}
    assert {order.interface for order in orders["a"]} == {"eth0"}


def run_two_nodes(**changes):
    """The results of two real ranks on this machine, each a node."""
    port = network_ranks.open_meeting("127.0.0.1")
    nodes = ["a", "b"]
    views = {node: view(node, eth0="127.0.0.1/8") for node in nodes}
    orders = network_ranks.plan(
        nodes, dict.fromkeys(nodes, 1), dict.fromkeys(nodes, "127.0.0.1"), port, views, on_gpu=False
    )
    ranks = network_ranks.run_ranks([orders["a"][0], orders["b"][0]._replace(**changes)])
    return {"a": ranks[:1], "b": ranks[1:]}


def test_ranks_of_two_nodes_measure_each_other_both_ways_and_sum_over_gloo():
    results = run_two_nodes()
    assert [one.error for ranks in results.values() for one in ranks] == ["", ""]
    bandwidth, judged = network_ranks.judge(results)
    assert (bandwidth.check, judged.check) == (BANDWIDTH, COLLECTIVE)
    assert "2 pairs: median" in bandwidth.evidence
    assert "2 ranks, 2 node(s): gloo " in judged.evidence and judged.tables is None
    table = bandwidth.tables["one TCP stream"]
    assert [list(row) for row in (table["a"], table["b"])] == [["b"], ["a"]]
    for speed in (table["a"]["b"], table["b"]["a"]):
        assert 1e-6 < speed["round_trip_s"] < 1.0 and 1e6 < speed["bytes_per_s"] < 1e12


def printed(step, pair=None, check="", **measured):
    """What a rank printed until it failed or ended."""
    return {"step": step, "pair": pair, "check": check} | measured


def test_where_a_rank_fails_before_the_pairs_the_bandwidth_is_skipped():
    forming, meeting = printed("forming the process group"), printed("waiting for the other ranks")
    results = {
        "a": [RankResult(0, "Error: timed out", 3, forming)],
        "b": [RankResult(1, "Error: no nowhere0", 2, meeting)],
    }
    bandwidth, failed = network_ranks.judge(results)
    assert (bandwidth.check, bandwidth.verdict) == (BANDWIDTH, Verdict.skipped)
    assert (failed.node, failed.verdict) == ("b", Verdict.fail)
    assert failed.evidence == "rank 1, waiting for the other ranks: Error: no nowhere0"


def test_a_pair_that_hangs_is_named_and_not_those_that_fail_after_it():
    step = "gloo: rank 0 to rank 2"
    results = {
        "a": [RankResult(0, "RuntimeError: timed out", 7, printed(step, [0, 2], BANDWIDTH))],
        "b": [RankResult(1, "RuntimeError: reset", 9, printed("gloo: x", [1, 2], BANDWIDTH))],
        "c": [RankResult(2, "RuntimeError: timed out", 7, printed(step, [0, 2], BANDWIDTH))],
    }
    found, skipped = network_ranks.judge(results)
    assert (found.check, found.node, found.verdict) == (BANDWIDTH, "a -> c", Verdict.fail)
    assert found.evidence.count(f"{step}: RuntimeError: timed out") == 2
    assert "MTU" in found.advice and "ethtool" in found.advice
    assert (skipped.check, skipped.verdict) == (COLLECTIVE, Verdict.skipped)


def test_where_nccl_fails_the_pairs_of_gloo_are_judged():
    speeds = {"gloo_between": [[1, 0, 1e-4, 1e9]]}, {"gloo_between": [[0, 1, 1e-4, 1e9]]}
    step = "NCCL: rank 0 to rank 1"
    results = {
        node: [RankResult(k, "Error: x", 9, printed(step, [0, 1], COLLECTIVE, **speeds[k]))]
        for k, node in enumerate("ab")
    }
    bandwidth, failed = network_ranks.judge(results)
    assert (bandwidth.check, bandwidth.verdict) == (BANDWIDTH, Verdict.ok)
    assert (failed.check, failed.node, failed.verdict) == (COLLECTIVE, "a -> b", Verdict.fail)
    assert "NCCL_DEBUG=INFO" in failed.advice


def rank(number, within=False, **received):
    """What a rank measured: gigabytes per second from others, each 0.02 ms there and back."""
    speed = {"bytes_per_s": 1e9, "latency_s": 1e-4}
    speeds = [[int(sender), number, 2e-5, rate * 1e9] for sender, rate in received.items()]
    between, inside = ([], speeds) if within else (speeds, [])
    measured = {"gloo": speed, "NCCL": speed, "gloo_between": between}
    measured |= {"nccl_between": between, "nccl_within": inside}
    return RankResult(number, "", 20, printed("done", **measured))


@pytest.mark.parametrize(("rate", "verdict"), [(4.2, Verdict.warn), (3, Verdict.fail)])
def test_a_pair_that_nccl_serves_slower_than_others_is_named(rate, verdict):
    results = {
        "a": [rank(0, **{"1": 40, "2": 41})],
        "b": [rank(1, **{"0": 42, "2": rate})],
        "c": [rank(2, **{"0": 40, "1": 41})],
    }
    (found,) = collective(results)
    assert (found.node, found.verdict) == ("c -> b", verdict)
    assert f"NCCL moves {rate} GB/s, round trip 0.020 ms, c -> b; the median of" in found.evidence
    assert "pairs is 41 GB/s, round trip 0.020 ms" in found.evidence
    assert found.tables["NCCL"]["c"] == {
        "a": {"bytes_per_s": 41e9, "round_trip_s": 2e-5},
        "b": {"bytes_per_s": rate * 1e9, "round_trip_s": 2e-5},
    }
    results["b"] = [rank(1, **{"0": 42, "2": 39})]
    (found,) = collective(results)
    assert found.verdict is Verdict.ok
    least = "NCCL between nodes at least 39 GB/s (c -> b), round trip at most 0.020 ms ("
    assert least in found.evidence


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(0.9e-3, Verdict.ok), (3e-3, Verdict.warn), (30e-3, Verdict.fail)],
)
def test_a_round_trip_over_nccl_is_judged_as_over_tcp(seconds, verdict):
    results = {
        "a": [rank(0, **{"1": 40, "2": 41})],
        "b": [rank(1, **{"0": 42, "2": 40})],
        "c": [rank(2, **{"0": 40, "1": 41})],
    }
    results["b"][0].printed["nccl_between"][1][2] = seconds
    (found,) = collective(results)
    assert found.verdict is verdict
    assert f"{1e3 * seconds:.3f} ms" in found.evidence and "c -> b" in found.evidence


@pytest.mark.parametrize(("rate", "verdict"), [(20, Verdict.warn), (19, Verdict.fail)])
def test_two_gpus_of_a_node_that_nccl_serves_slower_than_others_are_named(rate, verdict):
    received = [{"1": 200, "2": rate}, {"0": 200, "2": 210}, {"0": 190, "1": 200}]
    ranks = [rank(number, within=True, **rates) for number, rates in enumerate(received)]
    (found,) = collective({"a": ranks})
    assert (found.node, found.verdict) == ("a", verdict)
    assert f"NCCL moves {rate} GB/s" in found.evidence and "a GPU 2 -> a GPU 0" in found.evidence
    assert "the median of all pairs is 200 GB/s" in found.evidence
    assert "nvidia-smi topo -m" in found.advice
    table = found.tables["NCCL within nodes"]
    assert list(table) == ["a GPU 0", "a GPU 1", "a GPU 2"]
    assert list(table["a GPU 2"]) == ["a GPU 0", "a GPU 1"]


def test_of_one_rank_no_speed_is_told():
    speed = {"bytes_per_s": 0.0, "latency_s": 1e-5}
    alone = {"a": [RankResult(0, "", 9, {"gloo": speed, "NCCL": speed})]}
    (found,) = collective(alone)
    assert found.verdict is Verdict.ok
    assert found.evidence == "gloo and NCCL start; one rank has nothing to exchange"


def test_one_node_needs_no_port_and_its_ranks_start_without_multicast(monkeypatch):
    for name in SWITCHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    found = network.check(case("cluster.nvlink_multicast=off", quick=True))
    assert the(found, "network.rendezvous").evidence == network_ports.IN_A_FILE
    assert {name: os.environ.get(name) for name in SWITCHES} == SWITCHES | {"NCCL_NVLS_ENABLE": "1"}
