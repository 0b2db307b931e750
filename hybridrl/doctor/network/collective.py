"""Check network.collective: an all-reduce over all nodes with gloo, and with NCCL on GPUs.

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
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest

from hybridrl.config.planner.machine import local_machine
from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.findings import Finding, fail
from hybridrl.doctor.gather import gather, gather_each
from hybridrl.doctor.network.bandwidth import tournament
from hybridrl.doctor.network.collective_rules import CHECK, RankResult, judge
from hybridrl.doctor.network.nodes import NodeView, is_loopback, rank_zero_node

# Seconds for all ranks to import torch, maybe from shared storage, and to meet.
MEET_S = 60.0
# Seconds for one collective; for all collectives of a rank; for a round of pairs.
TIMEOUT_S, RANKS_S, ROUND_S = 15.0, 45.0, 2.0
# Seconds between the limit of a rank, at which it exits, and its kill.
GRACE_S = 5.0
RANKS_OF_ONE_NODE = 2
ERROR_CHARACTERS = 300

_MEETING: dict[int, socket.socket] = {}


@dataclass(frozen=True)
class RankOrder:
    """Arguments of one rank.

    Attributes:
        rank, world_size: among all nodes.
        address, port: of the store on rank 0's node.
        nodes: ranks of each node.
        rounds: pairs of ranks that measure NCCL (or gloo between nodes), round by round.
        interface: for gloo, unless the environment sets one.
        device: index of its GPU; None: gloo only.
        limit_s: seconds for everything after the meeting.
        timeout_s: seconds for a collective.
        meet_s: seconds for the meeting.
        listen_fd: listening socket of rank 0.
    """

    rank: int
    world_size: int
    address: str
    port: int
    nodes: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    interface: str | None
    device: int | None
    limit_s: float = RANKS_S
    timeout_s: float = TIMEOUT_S
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
        counts, findings = gather(agents, CHECK, count_gpus)
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
    arguments = {node: (tuple(orders[node]),) for node in nodes}
    timeout_s = orders[first][0].longest_s + 2 * GRACE_S
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
    rounds = _rounds([*ranks.values()]) if on_gpu or len(nodes) > 1 else ()

    def order(node: str, local: int, rank: int) -> RankOrder:
        own = addresses[node]
        return RankOrder(
            rank=rank,
            world_size=sum(map(len, ranks.values())),
            address=addresses[nodes[0]],
            port=port,
            nodes=tuple(ranks.values()),
            rounds=rounds,
            interface="lo" if is_loopback(own) else views[node].interface_of(own),
            device=local if on_gpu else None,
            limit_s=RANKS_S + ROUND_S * len(rounds),
        )

    return {
        node: [order(node, *each) for each in enumerate(group)] for node, group in ranks.items()
    }


def _rounds(ranks: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pair all ranks of a node, on all nodes at a time, then the first ranks of all nodes."""
    within = zip_longest(*map(tournament, ranks), fillvalue=[])
    rounds = [[pair for pairs in side_by_side for pair in pairs] for side_by_side in within]
    rounds += tournament([group[0] for group in ranks])
    both = ((tuple(pairs), tuple((b, a) for a, b in pairs)) for pairs in rounds if pairs)
    return tuple(way for ways in both for way in ways)


def open_meeting(address: str) -> int:
    """Listen for the ranks' store and return the port; rank 0 inherits the socket."""
    listener = listen(address, [0])
    port = listener.getsockname()[1]
    _MEETING[port] = listener
    return port


def count_gpus() -> int:
    """Count the GPUs that processes of this node may use."""
    return len(local_machine().gpus)


def run_ranks(orders: Sequence[RankOrder]) -> list[RankResult]:
    """Run this node's ranks until they exit or are killed."""
    stop = time.monotonic() + max(order.longest_s for order in orders)
    started = [(order, _start(order)) for order in orders]
    return [_finish(order, process, stop) for order, process in started]


def _start(order: RankOrder) -> "subprocess.Popen[str]":
    defaults = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    if order.interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = order.interface
    listener = _MEETING.pop(order.port) if order.rank == 0 else None
    if listener is not None:
        order = replace(order, listen_fd=listener.fileno())
    command = [sys.executable, "-m", "hybridrl.doctor.network.collective_rank"]
    process = subprocess.Popen(
        [*command, json.dumps(asdict(order))],
        env=defaults | dict(os.environ),
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
        error = f"killed after {order.longest_s:.0f} s {_last_line(err)}".strip()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    measured = lines[-1] if lines else {}
    return RankResult(order.rank, measured.get("step", "importing torch"), error, measured)


def _last_line(text: str) -> str:
    """Return the last error in an output, else the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1][:ERROR_CHARACTERS]
