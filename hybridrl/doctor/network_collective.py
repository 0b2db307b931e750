"""An all-reduce over all nodes, as a run does: with gloo, and with NCCL where there are GPUs.

Each rank is a process of its own: a collective that hangs cannot be ended otherwise.
"""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from hybridrl.config.machine import local_gpus
from hybridrl.controller.agents import Agents, call_all
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host import heard
from hybridrl.doctor.network_bandwidth import SLOW, tournament
from hybridrl.doctor.network_nodes import NodeView, is_loopback, rank_zero_node

CHECK = "network.collective"
# Seconds for ranks to find each other and for one collective; torch's import comes on top.
TIMEOUT_S = 15.0
RANKS_S = 45.0
# Of two ranks on one node where there are no others.
RANKS_OF_ONE_NODE = 2
ERROR_CHARACTERS = 300

_MEETING: dict[int, socket.socket] = {}


@dataclass(frozen=True)
class RankOrder:
    """What one rank is told.

    Attributes:
        rank, world_size: among all nodes.
        address, port: of the store on rank 0's node.
        nodes: the ranks of each node.
        rounds: pairs of ranks that measure NCCL between nodes, round by round.
        interface: for gloo, unless the environment names another.
        device: index of its GPU; None: gloo alone.
        timeout_s: of the group.
        listen_fd: rank 0's listening socket.
    """

    rank: int
    world_size: int
    address: str
    port: int
    nodes: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    interface: str | None
    device: int | None
    timeout_s: float = TIMEOUT_S
    listen_fd: int | None = None


class RankResult(NamedTuple):
    """How a rank ended.

    Attributes:
        rank: its number.
        step: the last one that it reached.
        error: the end of what it wrote, or that it was still waiting; empty if it went well.
        measured: what the last step says.
    """

    rank: int
    step: str
    error: str
    measured: dict[str, Any]


def check(
    agents: Agents, views: Mapping[str, NodeView], addresses: Mapping[str, str], *, on_gpu: bool
) -> list[Finding]:
    """Start the ranks on all nodes and judge what they say."""
    counts, findings = _ranks_per_node(agents, list(views), on_gpu=on_gpu)
    if findings:
        return findings
    first = rank_zero_node(addresses)
    nodes = [first, *(node for node in views if node != first)]
    answers = agents.call_each(open_meeting, {first: (addresses[first],)}, 10.0)
    ports, findings = heard(CHECK, answers)
    if findings:
        return findings
    orders = plan(nodes, counts, addresses, ports[first], views, on_gpu=on_gpu)
    arguments = {node: (tuple(orders[node]),) for node in nodes}
    results, findings = heard(CHECK, agents.call_each(run_ranks, arguments, RANKS_S + 10.0))
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
    """The orders of each node's ranks, rank 0 on the first node."""
    ranks, start = [], 0
    for node in nodes:
        ranks.append(tuple(range(start, start + counts[node])))
        start += counts[node]
    names = [str(group[0]) for group in ranks]
    rounds = tuple(
        tuple(way)
        for pairs in tournament(names)
        for way in (
            [(int(a), int(b)) for a, b in pairs],
            [(int(b), int(a)) for a, b in pairs],
        )
    )
    return {
        node: [
            RankOrder(
                rank=rank,
                world_size=start,
                address=addresses[nodes[0]],
                port=port,
                nodes=tuple(ranks),
                rounds=rounds if len(nodes) > 1 else (),
                interface=_interface(views[node], addresses[node]),
                device=local if on_gpu else None,
            )
            for local, rank in enumerate(group)
        ]
        for node, group in zip(nodes, ranks, strict=True)
    }


def open_meeting(address: str) -> int:
    """Listen on a port for the ranks' store; the socket waits for rank 0, which inherits it."""
    listener = listen(address, [0])
    port = listener.getsockname()[1]
    _MEETING[port] = listener
    return port


def count_gpus() -> int:
    """GPUs that processes of this node may use."""
    return len(local_gpus())


def run_ranks(orders: Sequence[RankOrder]) -> list[RankResult]:
    """Run this node's ranks to their end, or to the end of their time."""
    stop = time.monotonic() + RANKS_S
    started = [(order, _start(order)) for order in orders]
    return [_finish(order, process, stop) for order, process in started]


def judge(results: Mapping[str, Sequence[RankResult]]) -> list[Finding]:
    """Findings from the ranks of all nodes."""
    findings = [
        _judge_failed(node, [rank for rank in ranks if rank.error])
        for node, ranks in results.items()
        if any(rank.error for rank in ranks)
    ]
    if findings:
        return findings
    everyone = [rank for ranks in results.values() for rank in ranks]
    if not everyone:
        return []
    if len(everyone) == 1:
        started = " and ".join(name for name in ("gloo", "nccl") if name in everyone[0].measured)
        return [ok(CHECK, "all", f"{started} start; one rank has nothing to exchange")]
    texts = [
        f"{name} {_text(measured)}"
        for name in ("gloo", "nccl", "nccl_in_node")
        for measured in [
            _worst([rank.measured[name] for rank in everyone if name in rank.measured])
        ]
        if measured
    ]
    pairs = _pairs(results)
    if pairs:
        (a, b), rate = min(pairs.items(), key=lambda item: item[1])
        texts.append(f"NCCL between nodes at least {rate / 1e9:.3g} GB/s ({a} -> {b})")
    summary = f"{len(everyone)} ranks, {len(results)} node(s): {'; '.join(texts)}"
    return _judge_pairs(pairs) or [ok(CHECK, "all", summary)]


def _pairs(results: Mapping[str, Sequence[RankResult]]) -> dict[tuple[str, str], float]:
    """Bytes per second over NCCL from one node to another."""
    node_of = {rank.rank: node for node, ranks in results.items() for rank in ranks}
    return {
        (node_of[int(sender)], node): rate
        for node, ranks in results.items()
        for rank in ranks
        for sender, rate in rank.measured.get("nccl_from", {}).items()
    }


def _judge_pairs(pairs: Mapping[tuple[str, str], float]) -> list[Finding]:
    """Pairs of nodes that are slow over NCCL, which may take another way than TCP."""
    if not pairs:
        return []
    median = statistics.median_high(pairs.values())
    return [
        warn(
            CHECK,
            f"{a} -> {b}",
            f"NCCL moves {rate / 1e9:.3g} GB/s; the median of all pairs is {median / 1e9:.3g} GB/s",
            "See network.infiniband and `ibstat` on both; NCCL_DEBUG=INFO names the adapters it "
            "takes, and says NET/Socket where it fell back to TCP.",
        )
        for (a, b), rate in pairs.items()
        if rate < SLOW * median
    ]


def _judge_failed(node: str, ranks: Sequence[RankResult]) -> Finding:
    each = "; ".join(f"rank {rank.rank}, {rank.step}: {rank.error}" for rank in ranks)
    if any("NCCL" in rank.step for rank in ranks):
        advice = (
            "Start again with NCCL_DEBUG=INFO, which names the interface and adapter it takes; "
            "NCCL_SOCKET_IFNAME chooses the interface. Where it works with NCCL_IB_DISABLE=1, the "
            "fault is in InfiniBand or RoCE (network.infiniband)."
        )
    else:
        advice = (
            "Name the interface that leads to the other nodes: export GLOO_SOCKET_IFNAME=<name> "
            "(`ip -br addr`), and see network.ports and the errors of the other nodes' ranks."
        )
    return fail(CHECK, node, each, advice)


def _ranks_per_node(
    agents: Agents, nodes: list[str], *, on_gpu: bool
) -> tuple[dict[str, int], list[Finding]]:
    if not on_gpu:
        count = RANKS_OF_ONE_NODE if len(nodes) == 1 else 1
        return dict.fromkeys(nodes, count), []
    counts, findings = heard(CHECK, call_all(agents, count_gpus))
    for node, count in counts.items():
        if count == 0:
            advice = "See host.gpus; on a node without GPUs set hardware=cpu."
            findings.append(fail(CHECK, node, "no GPU for NCCL", advice))
    return counts, findings


def _start(order: RankOrder) -> "subprocess.Popen[str]":
    environment = dict(os.environ)
    if order.interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", order.interface)
    environment.setdefault("NCCL_DEBUG", "WARN")
    environment.setdefault("OMP_NUM_THREADS", "1")
    listener = _MEETING.pop(order.port) if order.rank == 0 else None
    if listener is not None:
        order = replace(order, listen_fd=listener.fileno())
    command = [sys.executable, "-m", "hybridrl.doctor.network_collective_rank"]
    process = subprocess.Popen(
        [*command, json.dumps(asdict(order))],
        env=environment,
        pass_fds=[listener.fileno()] if listener is not None else [],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if listener is not None:
        listener.close()
    return process


def _finish(order: RankOrder, process: "subprocess.Popen[str]", stop: float) -> RankResult:
    try:
        out, err = process.communicate(timeout=max(0.0, stop - time.monotonic()))
        error = "" if process.returncode == 0 else _last_line(err)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        error = f"still waiting after {RANKS_S:.0f} s {_last_line(err)}".strip()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    measured = lines[-1] if lines else {}
    return RankResult(order.rank, measured.get("step", "importing torch"), error, measured)


def _last_line(text: str) -> str:
    """The last error that a program wrote, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1][:ERROR_CHARACTERS]


def _interface(view: NodeView, address: str) -> str | None:
    return "lo" if is_loopback(address) else view.interface_of(address)


def _worst(measured: Sequence[dict[str, float]]) -> dict[str, float] | None:
    return min(measured, key=lambda one: one["bytes_per_s"]) if measured else None


def _text(measured: Mapping[str, float]) -> str:
    return (
        f"{measured['bytes_per_s'] / 1e9:.3g} GB/s per rank, "
        f"{1e3 * measured['latency_s']:.2f} ms for one number"
    )
