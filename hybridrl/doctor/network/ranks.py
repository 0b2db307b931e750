"""Starts a rank (rank.py) on each node or GPU, and judges network.bandwidth and network.collective.

Each rank is a process of its own, because a hanging collective cannot be cancelled.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from hybridrl.config.planner.machine import local_machine
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.findings import Finding, fail, ok, skipped
from hybridrl.doctor.network.nodes import NodeView, is_loopback, rank_zero_node
from hybridrl.doctor.network.speeds import (
    BANDWIDTH,
    COLLECTIVE,
    GLOO,
    NCCL_BETWEEN,
    NCCL_WITHIN,
    OF_NODE,
    Pair,
    Speed,
    Way,
    extremes,
    judge_bandwidth,
    judge_pairs,
    matrix,
    rounds_between,
    rounds_within,
)
from hybridrl.doctor.stages import gather, gather_each

# Seconds for all ranks to import torch, maybe from shared storage, and to meet.
MEET_S = 60.0
# Seconds for everything after the meeting, for a round of pairs, and for the probe's answer.
RANKS_S, ROUND_S, ANSWER_S = 45.0, 2.0, 10.0
RANKS_OF_ONE_NODE = 2
ERROR_CHARACTERS = 300
NCCL_FAILED = (
    "NCCL_DEBUG=INFO prints interface (NCCL_SOCKET_IFNAME) and adapter; if NCCL_IB_DISABLE=1 "
    "helps, see network.infiniband."
)
GLOO_FAILED = "export GLOO_SOCKET_IFNAME=<interface to the other nodes> (`ip -br addr`)"

_MEETING: dict[int, socket.socket] = {}


class RankOrder(NamedTuple):
    """Arguments of one rank.

    Attributes:
        address, port: of the store on rank 0's node; rank 0 inherits its socket, `listen_fd`.
        nodes: ranks of each node.
        interface: for gloo, unless the environment sets one.
        device: index of its GPU; None: gloo only.
        limit_s, meet_s: seconds for everything after the meeting, and for the meeting.
    """

    rank: int
    world_size: int
    address: str
    port: int
    nodes: tuple[tuple[int, ...], ...]
    interface: str | None
    device: int | None
    limit_s: float = RANKS_S
    meet_s: float = MEET_S
    listen_fd: int | None = None


class RankResult(NamedTuple):
    """Error of a rank (empty if it succeeded), number of its steps, and all that it printed."""

    rank: int
    error: str
    steps: int
    printed: dict[str, Any]


def check(
    agents: NodeProbes, views: Mapping[str, NodeView], addresses: Mapping[str, str], *, on_gpu: bool
) -> list[Finding]:
    """Start the ranks on all nodes and judge their results."""
    findings: list[Finding] = []
    counts = dict.fromkeys(views, RANKS_OF_ONE_NODE if len(views) == 1 else 1)
    if on_gpu:
        machines, findings = gather(agents, COLLECTIVE, local_machine)
        counts = {node: len(machine.gpus) for node, machine in machines.items()}
        advice = "See host.gpus; on a node without GPUs set hardware=cpu."
        without = [node for node, count in counts.items() if not count]
        findings += [fail(COLLECTIVE, node, "no GPU for NCCL", advice) for node in without]
    first = rank_zero_node(addresses)
    if not findings:
        meeting = {first: (addresses[first],)}
        ports, findings = gather_each(agents, COLLECTIVE, open_meeting, meeting, 10.0)
    if findings:
        return [skipped(BANDWIDTH, "all", "see network.collective"), *findings]
    nodes = [first, *(node for node in views if node != first)]
    orders = plan(nodes, counts, addresses, ports[first], views, on_gpu=on_gpu)
    timeout_s = MEET_S + orders[first][0].limit_s + ANSWER_S
    arguments = {node: (own,) for node, own in orders.items()}
    results, findings = gather_each(agents, COLLECTIVE, run_ranks, arguments, timeout_s)
    return findings + judge(results)


def plan(
    nodes: Sequence[str],
    counts: Mapping[str, int],
    addresses: Mapping[str, str],
    port: int,
    views: Mapping[str, NodeView],
    *,
    on_gpu: bool,
) -> dict[str, list[RankOrder]]:
    """Return the orders of each node's ranks, rank 0 on the first node."""
    numbers = iter(range(sum(counts[node] for node in nodes)))
    ranks = {node: tuple(islice(numbers, counts[node])) for node in nodes}
    between, within = (way([*ranks.values()]) for way in (rounds_between, rounds_within))
    rounds = len(within) + 2 * len(between) if on_gpu else len(between)
    return {
        node: [
            RankOrder(
                rank=rank,
                world_size=sum(counts.values()),
                address=addresses[nodes[0]],
                port=port,
                nodes=tuple(ranks.values()),
                interface="lo" if is_loopback(own) else views[node].interface_of(own),
                device=index if on_gpu else None,
                limit_s=RANKS_S + ROUND_S * rounds,
            )
            for index, rank in enumerate(ranks[node])
        ]
        for node, own in addresses.items()
    }


def open_meeting(address: str) -> int:
    """Listen for the ranks' store and return the port; rank 0 inherits the socket."""
    listener = listen(address, [0])
    port = int(listener.getsockname()[1])
    _MEETING[port] = listener
    return port


def run_ranks(orders: Sequence[RankOrder]) -> list[RankResult]:
    """Run this node's ranks until they exit or are killed."""
    stop = time.monotonic() + max(order.meet_s + order.limit_s for order in orders)
    started = [(order, _start(order)) for order in orders]
    return [_finish(order, process, stop) for order, process in started]


def _start(order: RankOrder) -> "subprocess.Popen[str]":
    defaults = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    if order.interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = order.interface
    with ExitStack() as stack:
        if order.rank == 0:
            listener = stack.enter_context(_MEETING.pop(order.port))
            order = order._replace(listen_fd=listener.fileno())
        return subprocess.Popen(
            [sys.executable, "-m", "hybridrl.doctor.network.rank", json.dumps(order)],
            env=defaults | dict(os.environ),
            pass_fds=() if order.listen_fd is None else (order.listen_fd,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _finish(order: RankOrder, process: "subprocess.Popen[str]", stop: float) -> RankResult:
    try:
        out, err = process.communicate(timeout=max(0.0, stop - time.monotonic()))
        error = "" if process.returncode == 0 else _last_line(err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        error = f"killed after {order.meet_s + order.limit_s:.0f} s {_last_line(err)}"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    printed = {"step": "importing torch", "pair": None, "check": ""}
    for line in lines:
        printed |= line
    return RankResult(order.rank, error, len(lines), printed)


def _last_line(text: str) -> str:
    """Return the last error in an output, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:ERROR_CHARACTERS]


def judge(results: Mapping[str, Sequence[RankResult]]) -> list[Finding]:
    """Judge the ranks of all nodes."""
    ranks = [rank for each in results.values() for rank in each]
    if not ranks:
        return [skipped(BANDWIDTH, "all", "see network.collective")]
    failures = _judge_failures(results)
    broken = {finding.check for finding in failures}
    speeds = {way: _speeds(way, results) for way in (GLOO, NCCL_BETWEEN, NCCL_WITHIN)}
    if BANDWIDTH in broken:
        return [*failures, skipped(COLLECTIVE, "all", "the failures above would make it hang")]
    if len(results) == 1:
        findings = [skipped(BANDWIDTH, "all", "there is one node")]
    elif all(GLOO.key in rank.printed for rank in ranks):
        findings = judge_bandwidth(speeds[GLOO])
    else:
        findings = [skipped(BANDWIDTH, "all", "see network.collective")]
    return findings + (failures or _judge_collective(results, speeds))


def _judge_failures(results: Mapping[str, Sequence[RankResult]]) -> list[Finding]:
    """Return a failure for each pair or node that failed in the first step in which one did."""
    failed = [(node, rank) for node, ranks in results.items() for rank in ranks if rank.error]
    earliest = min((rank.steps for _, rank in failed), default=0)
    nodes_of = {rank.rank: node for node, ranks in results.items() for rank in ranks}
    evidence: dict[tuple[str, str], list[str]] = {}
    advice = {}
    for node, rank in failed:
        step, pair = rank.printed["step"], rank.printed["pair"]
        if rank.steps > earliest:
            continue  # others had failed before
        names = [node] if pair is None else dict.fromkeys(nodes_of[number] for number in pair)
        place = rank.printed["check"] or COLLECTIVE, " -> ".join(names)
        evidence.setdefault(place, []).append(f"rank {rank.rank}, {step}: {rank.error}")
        advice[place] = NCCL_FAILED if "NCCL" in step else GLOO.advice if pair else GLOO_FAILED
    return [fail(*place, "; ".join(each), advice[place]) for place, each in evidence.items()]


def _speeds(way: Way, results: Mapping[str, Sequence[RankResult]]) -> dict[Pair, Speed]:
    """Return what the receivers measured, by places: nodes, or GPUs of a node."""
    places = {
        rank.rank: f"{node}{OF_NODE}{index}" if way is NCCL_WITHIN else node
        for node, ranks in results.items()
        for index, rank in enumerate(ranks)
    }
    rows = sorted(
        row for ranks in results.values() for rank in ranks for row in rank.printed.get(way.key, [])
    )
    return {(places[a], places[b]): Speed(*speed) for a, b, *speed in rows}


def _judge_collective(
    results: Mapping[str, Sequence[RankResult]], speeds: Mapping[Way, dict[Pair, Speed]]
) -> list[Finding]:
    ranks = [rank.printed for each in results.values() for rank in each]
    names = [name for name in ("gloo", "NCCL") if name in ranks[0]]
    if len(ranks) == 1:
        started = " and ".join(names)
        return [ok(COLLECTIVE, "all", f"{started} start; one rank has nothing to exchange")]
    texts = []
    for name in names:
        worst = min((rank[name] for rank in ranks), key=lambda one: one["bytes_per_s"])
        texts.append(
            f"{name} {worst['bytes_per_s'] / 1e9:.3g} GB/s per rank, "
            f"{1e3 * worst['latency_s']:.2f} ms for one number"
        )
    slow: list[Finding] = []
    tables = {}
    for what, way in (("nodes", NCCL_BETWEEN), ("GPUs of a node", NCCL_WITHIN)):
        if pairs := speeds[way]:
            texts.append(f"NCCL between {what} {extremes(pairs)}")
            slow += judge_pairs(way, pairs)
            tables[way.title] = matrix(pairs)
    summary = f"{len(ranks)} ranks, {len(results)} node(s): {'; '.join(texts)}"
    first, *others = slow or [ok(COLLECTIVE, "all", summary)]
    return [replace(first, tables=tables or None), *others]
