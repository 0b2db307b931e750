"""Check network.collective: an all-reduce over all nodes with gloo; on GPUs, NCCL also in pairs.

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
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from hybridrl.config.planner.machine import local_machine
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.context import gather, gather_each
from hybridrl.doctor.findings import Finding, Matrix, fail, ok
from hybridrl.doctor.network.bandwidth import Pair, extremes, matrix, rounds_of, slow_pairs
from hybridrl.doctor.network.nodes import NodeView, is_loopback, rank_zero_node
from hybridrl.doctor.network.server import Speed

CHECK = "network.collective"
# Seconds for all ranks to import torch, maybe from shared storage, and to meet.
MEET_S = 60.0
# Seconds for all collectives of a rank; for a round of pairs.
RANKS_S, ROUND_S = 45.0, 2.0
# Seconds between the limit of a rank, at which it exits, and its kill.
GRACE_S = 5.0
RANKS_OF_ONE_NODE = 2
ERROR_CHARACTERS = 300

OF_NODE = " GPU "
# Keys of a rank's measurements over all ranks, and their names in the report.
NAMES = {"gloo": "gloo", "nccl": "NCCL"}
BETWEEN = "See network.infiniband and `ibstat` on both; NCCL_DEBUG=INFO prints the adapter or TCP."
WITHIN = "See `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, and P2P or SHM in NCCL_DEBUG=INFO."
NCCL_FAILED = (
    "NCCL_DEBUG=INFO prints interface (NCCL_SOCKET_IFNAME) and adapter; if NCCL_IB_DISABLE=1 "
    "helps, see network.infiniband."
)
GLOO_FAILED = "export GLOO_SOCKET_IFNAME=<interface to the other nodes> (`ip -br addr`)"

_MEETING: dict[int, socket.socket] = {}


class RankResult(NamedTuple):
    """Last step of a rank, its error (empty if it succeeded), and its measurements."""

    rank: int
    step: str
    error: str
    measured: dict[str, Any]


@dataclass(frozen=True)
class RankOrder:
    """Arguments of one rank.

    Attributes:
        address, port: of the store on rank 0's node; rank 0 inherits its socket, `listen_fd`.
        nodes: ranks of each node.
        interface: for gloo, unless the environment sets one.
        device: index of its GPU; None: gloo only.
        meet_s, limit_s: seconds for the meeting, and for everything after it.
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

    @property
    def longest_s(self) -> float:
        """Seconds after which the rank is killed."""
        return self.meet_s + self.limit_s + GRACE_S


def check(
    agents: NodeProbes, views: Mapping[str, NodeView], addresses: Mapping[str, str], *, on_gpu: bool
) -> list[Finding]:
    """Start the ranks on all nodes and judge their results."""
    findings: list[Finding] = []
    counts = dict.fromkeys(views, RANKS_OF_ONE_NODE if len(views) == 1 else 1)
    if on_gpu:
        machines, findings = gather(agents, CHECK, local_machine)
        counts = {node: len(machine.gpus) for node, machine in machines.items()}
        advice = "See host.gpus; on a node without GPUs set hardware=cpu."
        without = [node for node, count in counts.items() if not count]
        findings += [fail(CHECK, node, "no GPU for NCCL", advice) for node in without]
    if findings:
        return findings
    first = rank_zero_node(addresses)
    nodes = [first, *(node for node in views if node != first)]
    ports, findings = gather_each(agents, CHECK, open_meeting, {first: (addresses[first],)}, 10.0)
    if findings:
        return findings
    orders = plan(nodes, counts, addresses, ports[first], views, on_gpu=on_gpu)
    timeout_s = orders[first][0].longest_s + 2 * GRACE_S
    arguments = {node: (own,) for node, own in orders.items()}
    results, findings = gather_each(agents, CHECK, run_ranks, arguments, timeout_s)
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
    rounds = rounds_of([*ranks.values()]) if on_gpu else []
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
                limit_s=RANKS_S + ROUND_S * len(rounds),
            )
            for index, rank in enumerate(ranks[node])
        ]
        for node, own in addresses.items()
    }


def open_meeting(address: str) -> int:
    """Listen for the ranks' store and return the port; rank 0 inherits the socket."""
    listener = listen(address, [0])
    port = listener.getsockname()[1]
    _MEETING[port] = listener
    return port


def run_ranks(orders: Sequence[RankOrder]) -> list[RankResult]:
    """Run this node's ranks until they exit or are killed."""
    stop = time.monotonic() + max(order.longest_s for order in orders)
    started = [(order, _start(order)) for order in orders]
    return [_finish(order, process, stop) for order, process in started]


def _start(order: RankOrder) -> "subprocess.Popen[str]":
    defaults = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    if order.interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = order.interface
    command = [sys.executable, "-m", "hybridrl.doctor.network.collective_rank"]
    with ExitStack() as stack:
        inherited: tuple[int, ...] = ()
        if order.rank == 0:
            listener = stack.enter_context(_MEETING.pop(order.port))
            inherited = (listener.fileno(),)
            order = replace(order, listen_fd=listener.fileno())
        return subprocess.Popen(
            [*command, json.dumps(asdict(order))],
            env=defaults | dict(os.environ),
            pass_fds=inherited,
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
        error = f"killed after {order.longest_s:.0f} s {_last_line(err)}".strip()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    measured = lines[-1] if lines else {}
    return RankResult(order.rank, measured.get("step", "importing torch"), error, measured)


def _last_line(text: str) -> str:
    """Return the last error in an output, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1][:ERROR_CHARACTERS]


def judge(results: Mapping[str, Sequence[RankResult]]) -> list[Finding]:
    """Judge the ranks of all nodes."""
    found = []
    for node, ranks in results.items():
        if failed := [rank for rank in ranks if rank.error]:
            each = "; ".join(f"rank {rank.rank}, {rank.step}: {rank.error}" for rank in failed)
            in_nccl = any("NCCL" in rank.step for rank in failed)
            found.append(fail(CHECK, node, each, NCCL_FAILED if in_nccl else GLOO_FAILED))
    measured = [rank.measured for ranks in results.values() for rank in ranks]
    if found or not measured:
        return found
    if len(measured) == 1:
        started = " and ".join(name for key, name in NAMES.items() if key in measured[0])
        return [ok(CHECK, "all", f"{started} start; one rank has nothing to exchange")]
    return _judge_speeds(results, measured)


def _judge_speeds(
    results: Mapping[str, Sequence[RankResult]], measured: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    texts = []
    for key, name in NAMES.items():
        if values := [one[key] for one in measured if key in one]:
            worst = min(values, key=lambda one: one["bytes_per_s"])
            texts.append(
                f"{name} {worst['bytes_per_s'] / 1e9:.3g} GB/s per rank, "
                f"{1e3 * worst['latency_s']:.2f} ms for one number"
            )
    between, within = _pairs(results)
    slow: list[Finding] = []
    tables: dict[str, Matrix] = {}
    for what, title, pairs, advice in (
        ("nodes", "NCCL", between, BETWEEN),
        ("GPUs of a node", "NCCL within nodes", within, WITHIN),
    ):
        if pairs:
            slowest, farthest = extremes(pairs)
            texts.append(
                f"NCCL between {what} at least {_rate(pairs[slowest])} ({' -> '.join(slowest)}), "
                f"round trip at most {_trip(pairs[farthest])} ({' -> '.join(farthest)})"
            )
            slow += _slow_pairs(pairs, advice)
            tables[title] = matrix(pairs)
    summary = f"{len(measured)} ranks, {len(results)} node(s): {'; '.join(texts)}"
    first, *others = slow or [ok(CHECK, "all", summary)]
    return [replace(first, tables=tables or None), *others]


def _pairs(
    results: Mapping[str, Sequence[RankResult]],
) -> tuple[dict[Pair, Speed], dict[Pair, Speed]]:
    """Return speeds over NCCL between nodes, and between GPUs of a node."""
    places = {
        rank.rank: (node, f"{node}{OF_NODE}{index}")
        for node, ranks in results.items()
        for index, rank in enumerate(ranks)
    }
    speeds = sorted(
        (int(sender), rank.rank, Speed(measured["round_trip_s"], measured["bytes_per_s"]))
        for ranks in results.values()
        for rank in ranks
        for sender, measured in rank.measured.get("nccl_from", {}).items()
    )
    between, within = {}, {}
    for sender, receiver, speed in speeds:
        (node, gpu), (other_node, other_gpu) = places[sender], places[receiver]
        if node == other_node:
            within[gpu, other_gpu] = speed
        else:
            between[node, other_node] = speed
    return between, within


def _slow_pairs(pairs: Mapping[Pair, Speed], advice: str) -> list[Finding]:
    """Judge pairs by the rule of network.bandwidth."""
    found = []
    for pair, judged, speed, median in slow_pairs(pairs, _text):
        nodes = " -> ".join(dict.fromkeys(place.partition(OF_NODE)[0] for place in pair))
        evidence = f"NCCL moves {speed}, {' -> '.join(pair)}; {median}"
        found.append(judged(CHECK, nodes, evidence, advice))
    return found


def _text(speed: Speed) -> str:
    return f"{_rate(speed)}, round trip {_trip(speed)}"


def _rate(speed: Speed) -> str:
    return f"{speed.bytes_per_s / 1e9:.3g} GB/s"


def _trip(speed: Speed) -> str:
    return f"{1e3 * speed.round_trip_s:.3f} ms"
