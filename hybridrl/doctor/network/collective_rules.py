"""Rules for the results of the collective: failed ranks, and slow pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hybridrl.doctor.findings import Finding, Matrix, fail, ok, warn
from hybridrl.doctor.network.bandwidth import (
    Pair,
    extremes,
    is_broken,
    matrix,
    suspects,
    typical_of,
)
from hybridrl.doctor.network.server import Speed

CHECK = "network.collective"
# Keys of a rank's measurements over all ranks, and their names in the report.
NAMES = {"gloo": "gloo", "nccl": "NCCL", "nccl_in_node": "NCCL within a node"}
ADVICE = {
    "gloo": "gloo uses TCP: see network.bandwidth and network.interfaces; GLOO_SOCKET_IFNAME "
    "chooses the interface.",
    "NCCL": "See network.infiniband and `ibstat` on both; NCCL_DEBUG=INFO prints the adapters, or "
    "NET/Socket if it uses TCP.",
}
ADVICE_WITHIN = (
    "`nvidia-smi topo -m` shows the path between them, `nvidia-smi nvlink -s` links that are down; "
    "NCCL_DEBUG=INFO prints P2P or SHM."
)
NCCL_FAILED = (
    "Start again with NCCL_DEBUG=INFO, which prints interface and adapter; NCCL_SOCKET_IFNAME "
    "chooses the interface. If NCCL_IB_DISABLE=1 helps, the fault is in InfiniBand or RoCE "
    "(network.infiniband)."
)
GLOO_FAILED = (
    "Set the interface that leads to the other nodes: export GLOO_SOCKET_IFNAME=<name> (`ip -br "
    "addr`), and see network.ports and the errors of the other nodes' ranks."
)


class RankResult(NamedTuple):
    """Last step of a rank, its error (empty if it succeeded), and its measurements."""

    rank: int
    step: str
    error: str
    measured: dict[str, Any]


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
        started = " and ".join(NAMES[name] for name in ("gloo", "nccl") if name in measured[0])
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
    over = "NCCL" if any("nccl_from" in one for one in measured) else "gloo"
    between, within, node_of = _pairs(results, f"{over.lower()}_from")
    about = {pair: " -> ".join(pair) for pair in between}
    about |= {pair: node_of[pair[0]] for pair in within}
    slow: list[Finding] = []
    tables: dict[str, Matrix] = {}
    for what, title, pairs, advice in (
        ("nodes", over, between, ADVICE[over]),
        ("GPUs of a node", f"{over} within nodes", within, ADVICE_WITHIN),
    ):
        if pairs:
            slowest, farthest = extremes(pairs)
            texts.append(
                f"{over} between {what} at least {_rate(pairs[slowest])} ({' -> '.join(slowest)}), "
                f"round trip at most {_trip(pairs[farthest])} ({' -> '.join(farthest)})"
            )
            slow += _slow_pairs(over, pairs, about, advice)
            tables[title] = matrix(pairs)
    summary = f"{len(measured)} ranks, {len(results)} node(s): {'; '.join(texts)}"
    first, *others = slow or [ok(CHECK, "all", summary)]
    return [replace(first, tables=tables or None), *others]


def _pairs(
    results: Mapping[str, Sequence[RankResult]], received: str
) -> tuple[dict[Pair, Speed], dict[Pair, Speed], dict[str, str]]:
    """Return speeds between nodes, speeds between GPUs of a node, and the node of each GPU."""
    place_of = {
        rank.rank: (node, f"{node} GPU {index}")
        for node, ranks in results.items()
        for index, rank in enumerate(ranks)
    }
    speeds = sorted(
        (int(sender), rank.rank, Speed(measured["round_trip_s"], measured["bytes_per_s"]))
        for ranks in results.values()
        for rank in ranks
        for sender, measured in rank.measured.get(received, {}).items()
    )
    between, within = {}, {}
    for sender, receiver, speed in speeds:
        (node, gpu), (other_node, other_gpu) = place_of[sender], place_of[receiver]
        if node == other_node:
            within[gpu, other_gpu] = speed
        else:
            between[node, other_node] = speed
    return between, within, {gpu: node for node, gpu in place_of.values()}


def _slow_pairs(
    over: str, pairs: Mapping[Pair, Speed], about: Mapping[Pair, str], advice: str
) -> list[Finding]:
    """Judge pairs by the rule of network.bandwidth.

    Over gloo only broken pairs count: its rates depend on the load of the hosts, and
    network.bandwidth measures slow pairs twice.
    """
    typical, found = typical_of(pairs), []
    for pair, speed in suspects(pairs).items():
        if (broken := is_broken(speed, typical)) or over == "NCCL":
            evidence = (
                f"{over} moves {_rate(speed)}, round trip {_trip(speed)}, {' -> '.join(pair)}; the "
                f"median of all pairs is {_rate(typical)}, round trip {_trip(typical)}"
            )
            found.append((fail if broken else warn)(CHECK, about[pair], evidence, advice))
    return found


def _rate(speed: Speed) -> str:
    return f"{speed.bytes_per_s / 1e9:.3g} GB/s"


def _trip(speed: Speed) -> str:
    return f"{1e3 * speed.round_trip_s:.3f} ms"
