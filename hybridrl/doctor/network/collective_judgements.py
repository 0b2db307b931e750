"""What the ranks of the doctor's collectives mean: who failed at what, and which pairs are slow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.network.bandwidth import Pair, is_broken, matrix, suspects, typical_of
from hybridrl.doctor.network.server import Speed

CHECK = "network.collective"
# What a rank measured over all ranks, by its name there, and what it is called.
NAMES = {"gloo": "gloo", "nccl": "NCCL", "nccl_in_node": "NCCL within a node"}
ADVICE = {
    "gloo": "gloo is TCP: see network.bandwidth and network.interfaces; GLOO_SOCKET_IFNAME names "
    "the interface.",
    "NCCL": "See network.infiniband and `ibstat` on both; NCCL_DEBUG=INFO names the adapters it "
    "takes, and says NET/Socket where it fell back to TCP.",
}


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
        started = " and ".join(NAMES[n] for n in ("gloo", "nccl") if n in everyone[0].measured)
        return [ok(CHECK, "all", f"{started} start; one rank has nothing to exchange")]
    texts = [
        f"{name} {_text(measured)}"
        for key, name in NAMES.items()
        for measured in [_worst([rank.measured[key] for rank in everyone if key in rank.measured])]
        if measured
    ]
    over = "NCCL" if any("nccl_from" in rank.measured for rank in everyone) else "gloo"
    between, within, node_of = _pairs(results, f"{over.lower()}_from")
    for what, pairs in (("nodes", between), ("GPUs of a node", within)):
        if pairs:
            (a, b), least = min(pairs.items(), key=lambda item: item[1].bytes_per_s)
            (c, d), most = max(pairs.items(), key=lambda item: item[1].round_trip_s)
            texts.append(
                f"{over} between {what} at least {_rate(least)} ({a} -> {b}), round trip at most "
                f"{_trip(most)} ({c} -> {d})"
            )
    summary = f"{len(everyone)} ranks, {len(results)} node(s): {'; '.join(texts)}"
    slow = _judge_pairs(over, between, lambda a, b: f"{a} -> {b}", ADVICE[over])
    slow += _judge_pairs(
        over,
        within,
        lambda a, _: node_of[a],
        "`nvidia-smi topo -m` shows the way between them, `nvidia-smi nvlink -s` links that are "
        "down; NCCL_DEBUG=INFO says whether it takes P2P or shared memory.",
    )
    first, *others = slow or [ok(CHECK, "all", summary)]
    titles = {over: between, f"{over} within nodes": within}
    tables = {title: matrix(pairs) for title, pairs in titles.items() if pairs}
    return [replace(first, tables=tables or None), *others]


def _pairs(
    results: Mapping[str, Sequence[RankResult]], received: str
) -> tuple[dict[Pair, Speed], dict[Pair, Speed], dict[str, str]]:
    """Speeds from one node to another, and between GPUs of a node; each GPU's node.

    Args:
        results: of the ranks of all nodes.
        received: under which name a rank measured what the others sent.
    """
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


def _judge_pairs(
    over: str, pairs: Mapping[Pair, Speed], about: Callable[[str, str], str], advice: str
) -> list[Finding]:
    """Pairs that are slow by the rule for one TCP stream, than which NCCL may go another way.

    Over gloo only those that are broken: its rates follow how busy the hosts are, and of what it
    goes over network.bandwidth tells, which looks at slow pairs twice.

    Args:
        over: NCCL or gloo.
        pairs: what was measured.
        about: what a finding about two of them is about.
        advice: what to do about it.
    """
    if not pairs:
        return []
    typical = typical_of(pairs)
    slow = suspects(pairs)
    if over == "gloo":
        slow = {pair: speed for pair, speed in slow.items() if is_broken(speed, typical)}
    return [
        (fail if is_broken(speed, typical) else warn)(
            CHECK,
            about(a, b),
            f"{over} moves {_rate(speed)}, round trip {_trip(speed)}, {a} -> {b}; the median of "
            f"all pairs is {_rate(typical)}, round trip {_trip(typical)}",
            advice,
        )
        for (a, b), speed in sorted(slow.items(), key=lambda item: item[1].bytes_per_s)
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


def _worst(measured: Sequence[dict[str, float]]) -> dict[str, float] | None:
    return min(measured, key=lambda one: one["bytes_per_s"]) if measured else None


def _text(measured: Mapping[str, float]) -> str:
    return (
        f"{measured['bytes_per_s'] / 1e9:.3g} GB/s per rank, "
        f"{1e3 * measured['latency_s']:.2f} ms for one number"
    )


def _rate(speed: Speed) -> str:
    return f"{speed.bytes_per_s / 1e9:.3g} GB/s"


def _trip(speed: Speed) -> str:
    return f"{1e3 * speed.round_trip_s:.3f} ms"
