"""The doctor's collectives: their plan, real ranks that fail or hang, and what results mean."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from hybridrl.config.planner.multicast import SWITCHES
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network import collective as network_collective
from hybridrl.doctor.network import ports as network_ports
from hybridrl.doctor.network import stage as network
from hybridrl.doctor.network.bandwidth import rounds_of
from hybridrl.doctor.network.collective import RankResult
from tests.support.host_cases import case, the
from tests.support.network_cases import view

pytestmark = pytest.mark.full


def run_rank(**changes):
    """The findings about one real rank of two on this machine; the other never comes."""
    alone = {"a": view(eth0="127.0.0.1/8")}
    port = network_collective.open_meeting("127.0.0.1")
    planned = network_collective.plan(
        ["a"], {"a": 1}, {"a": "127.0.0.1"}, port, alone, on_gpu=False
    )
    order = dataclasses.replace(planned["a"][0], **changes)
    return network_collective.judge({"a": network_collective.run_ranks([order])})


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


def test_a_rank_that_hangs_ends_itself_at_its_limit():
    (found,) = run_rank(limit_s=0.0)
    assert found.verdict is Verdict.fail
    assert "still waiting after 0 s" in found.evidence


def test_pairs_get_time_of_their_own():
    nodes = [f"n{k}" for k in range(16)]
    orders = network_collective.plan(
        nodes,
        dict.fromkeys(nodes, 8),
        dict.fromkeys(nodes, "10.0.1.2"),
        1234,
        dict.fromkeys(nodes, view()),
        on_gpu=True,
    )
    order = orders["n3"][0]
    assert len(rounds_of(order.nodes)) == 2 * 7 + 2 * 15
    assert order.limit_s == network_collective.RANKS_S + 44 * network_collective.ROUND_S


def test_ranks_are_dealt_node_by_node_from_rank_zeros_node():
    views = {"a": view(eth0="10.0.1.9/24"), "b": view("b", eth0="10.0.1.3/24")}
    addresses = {"a": "10.0.1.9", "b": "10.0.1.3"}
    orders = network_collective.plan(
        ["b", "a"], {"a": 2, "b": 3}, addresses, 1234, views, on_gpu=True
    )
    assert [(order.rank, order.device) for order in orders["b"]] == [(0, 0), (1, 1), (2, 2)]
    assert [(order.rank, order.device) for order in orders["a"]] == [(3, 0), (4, 1)]
    assert {order.nodes for order in orders["a"] + orders["b"]} == {((0, 1, 2), (3, 4))}
    rounds = rounds_of(orders["a"][0].nodes)
    pairs = [frozenset(pair) for way in rounds for pair in way]
    assert sorted(map(sorted, pairs)) == sorted([[0, 1], [0, 2], [1, 2], [3, 4], [0, 3]] * 2)
    for way in rounds:
        ranks = [rank for pair in way for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert {order.address for order in orders["a"]} == {"10.0.1.3"}
    assert {order.interface for order in orders["a"]} == {"eth0"}


OVER_GLOO = """
import json, sys
from torch import distributed as dist
from hybridrl.doctor.network.collective_rank import pairs
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
measured = pairs(rank, [[0], [1]], "cpu", dist.group.WORLD)
dist.barrier()
print(json.dumps(measured))
"""


def test_two_ranks_measure_each_other_both_ways(tmp_path):
    """Over gloo, by the same code as over NCCL, which needs GPUs."""
    command = [sys.executable, "-c", OVER_GLOO]
    started = [
        subprocess.Popen([*command, str(k), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for k in range(2)
    ]
    found = [json.loads(one.communicate(timeout=60)[0].splitlines()[-1]) for one in started]
    assert [list(senders) for senders in found] == [["1"], ["0"]]
    for senders in found:
        (speed,) = senders.values()
        assert 1e-6 < speed["round_trip_s"] < 1.0 and 1e6 < speed["bytes_per_s"] < 1e12
    results = {
        node: [RankResult(k, "done", "", {"nccl_from": found[k]})] for k, node in enumerate("ab")
    }
    judged = network_collective.judge(results)[0]
    assert judged.tables["NCCL"] == {"a": {"b": found[1]["0"]}, "b": {"a": found[0]["1"]}}


def test_ranks_of_two_nodes_sum_over_gloo_without_pairs():
    port = network_collective.open_meeting("127.0.0.1")
    nodes = ["a", "b"]
    views = {node: view(node, eth0="127.0.0.1/8") for node in nodes}
    orders = network_collective.plan(
        nodes, dict.fromkeys(nodes, 1), dict.fromkeys(nodes, "127.0.0.1"), port, views, on_gpu=False
    )
    ranks = network_collective.run_ranks(orders["a"] + orders["b"])
    assert [one.error for one in ranks] == ["", ""]
    (judged,) = network_collective.judge({"a": ranks[:1], "b": ranks[1:]})
    assert "2 ranks, 2 node(s): gloo " in judged.evidence and judged.tables is None


def rank(number, **received):
    """What a rank measured: gigabytes per second from others, each 0.02 ms there and back."""
    speed = {"bytes_per_s": 1e9, "latency_s": 1e-4}
    speeds = {
        sender: {"bytes_per_s": rate * 1e9, "round_trip_s": 2e-5}
        for sender, rate in received.items()
    }
    return RankResult(number, "done", "", {"gloo": speed, "nccl": speed, "nccl_from": speeds})


@pytest.mark.parametrize(("rate", "verdict"), [(4.2, Verdict.warn), (3, Verdict.fail)])
def test_a_pair_that_nccl_serves_slower_than_others_is_named(rate, verdict):
    results = {
        "a": [rank(0, **{"1": 40, "2": 41})],
        "b": [rank(1, **{"0": 42, "2": rate})],
        "c": [rank(2, **{"0": 40, "1": 41})],
    }
    (found,) = network_collective.judge(results)
    assert (found.node, found.verdict) == ("c -> b", verdict)
    assert f"NCCL moves {rate} GB/s, round trip 0.020 ms, c -> b; the median of" in found.evidence
    assert "pairs is 41 GB/s, round trip 0.020 ms" in found.evidence
    assert found.tables["NCCL"]["c"] == {
        "a": {"bytes_per_s": 41e9, "round_trip_s": 2e-5},
        "b": {"bytes_per_s": rate * 1e9, "round_trip_s": 2e-5},
    }
    results["b"] = [rank(1, **{"0": 42, "2": 39})]
    (found,) = network_collective.judge(results)
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
    results["b"][0].measured["nccl_from"]["2"]["round_trip_s"] = seconds
    (found,) = network_collective.judge(results)
    assert found.verdict is verdict
    assert f"{1e3 * seconds:.3f} ms" in found.evidence and "c -> b" in found.evidence


@pytest.mark.parametrize(("rate", "verdict"), [(20, Verdict.warn), (19, Verdict.fail)])
def test_two_gpus_of_a_node_that_nccl_serves_slower_than_others_are_named(rate, verdict):
    received = [{"1": 200, "2": rate}, {"0": 200, "2": 210}, {"0": 190, "1": 200}]
    ranks = [rank(number, **rates) for number, rates in enumerate(received)]
    (found,) = network_collective.judge({"a": ranks})
    assert (found.node, found.verdict) == ("a", verdict)
    assert f"NCCL moves {rate} GB/s" in found.evidence and "a GPU 2 -> a GPU 0" in found.evidence
    assert "the median of all pairs is 200 GB/s" in found.evidence
    assert "nvidia-smi topo -m" in found.advice
    table = found.tables["NCCL within nodes"]
    assert list(table) == ["a GPU 0", "a GPU 1", "a GPU 2"]
    assert list(table["a GPU 2"]) == ["a GPU 0", "a GPU 1"]


def test_of_one_rank_no_speed_is_told():
    speed = {"bytes_per_s": 0.0, "latency_s": 1e-5}
    alone = {"a": [RankResult(0, "done", "", {"gloo": speed, "nccl": speed})]}
    (found,) = network_collective.judge(alone)
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
