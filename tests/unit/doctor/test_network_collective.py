"""The doctor's collectives: their plan, real ranks that fail or hang, and what results mean."""

import dataclasses

from network_cases import view

from hybridrl.doctor import network_collective
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.network_collective_judgements import RankResult


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
    assert len(order.rounds) == 2 * 7 + 2 * 15
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
    pairs = [frozenset(pair) for way in orders["a"][0].rounds for pair in way]
    assert sorted(map(sorted, pairs)) == sorted([[0, 1], [0, 2], [1, 2], [3, 4], [0, 3]] * 2)
    for way in orders["a"][0].rounds:
        ranks = [rank for pair in way for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert {order.address for order in orders["a"]} == {"10.0.1.3"}
    assert {order.interface for order in orders["a"]} == {"eth0"}


def test_a_pair_that_nccl_serves_slower_than_others_is_named():
    def rank(number, **received):
        speed = {"bytes_per_s": 1e9, "latency_s": 1e-4}
        both = {"gloo": speed, "nccl": speed}
        return [RankResult(number, "done", "", both | {"nccl_from": received})]

    results = {
        "a": rank(0, **{"1": 40e9, "2": 41e9}),
        "b": rank(1, **{"0": 42e9, "2": 3e9}),
        "c": rank(2, **{"0": 40e9, "1": 41e9}),
    }
    (found,) = network_collective.judge(results)
    assert (found.node, found.verdict) == ("c -> b", Verdict.warn)
    assert "NCCL moves 3 GB/s; the median of all pairs is 41 GB/s" in found.evidence
    assert found.tables["NCCL"]["c"] == {"a": {"bytes_per_s": 41e9}, "b": {"bytes_per_s": 3e9}}
    results["b"] = rank(1, **{"0": 42e9, "2": 39e9})
    (found,) = network_collective.judge(results)
    assert found.verdict is Verdict.ok
    assert "NCCL between nodes at least 39 GB/s (c -> b)" in found.evidence


def test_two_gpus_of_a_node_that_nccl_serves_slower_than_others_are_named():
    speed = {"bytes_per_s": 1e9, "latency_s": 1e-4}
    received = [{"1": 200e9, "2": 20e9}, {"0": 200e9, "2": 210e9}, {"0": 190e9, "1": 200e9}]
    ranks = [
        RankResult(rank, "done", "", {"gloo": speed, "nccl": speed, "nccl_from": rates})
        for rank, rates in enumerate(received)
    ]
    (found,) = network_collective.judge({"a": ranks})
    assert (found.node, found.verdict) == ("a GPU 2 -> a GPU 0", Verdict.warn)
    assert "NCCL moves 20 GB/s; the median of all pairs is 200 GB/s" in found.evidence
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
