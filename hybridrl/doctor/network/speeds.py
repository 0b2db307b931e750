"""Speeds of pairs: which pairs are measured at the same time, and which of them are too slow."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from hybridrl.doctor.findings import Finding, Matrix, fail, ok, warn

BANDWIDTH, COLLECTIVE = "network.bandwidth", "network.collective"
# Shares of the median. Below half a pair is slower than load explains: a warning. Below a tenth it
# uses another route (a management network, a degraded link) and slows every collective: a failure.
SLOW, BROKEN = 0.5, 0.1
# Round trips below these pass without a warning, or without a failure.
LEAST_ROUND_TRIP_S, LONG_ROUND_TRIP_S = 1e-3, 10e-3
# Half of Gigabit Ethernet, which carries 118 MB/s: less is a fault even if all pairs are equal.
LEAST_BYTES_PER_S = 50e6
MAX_SHOWN = 20
OF_NODE = " GPU "

P = TypeVar("P")
Pair = tuple[str, str]
# Pairs of ranks, sender first, that send at the same time.
Round = list[tuple[int, int]]


class Speed(NamedTuple):
    """Seconds per round trip and bytes per second from one rank to another."""

    round_trip_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        rate = self.bytes_per_s
        text = f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"
        return f"{text}, round trip {1e3 * self.round_trip_s:.3f} ms"


class Way(NamedTuple):
    """A kind of pairs: key and check of its measurements, title of their table, texts."""

    key: str
    check: str
    title: str
    prefix: str
    advice: str


GLOO = Way(
    "gloo_between",
    BANDWIDTH,
    "one TCP stream",
    "",
    "On both, see link (`ethtool <interface>`, `ip -s link`), route (`ip route get`), limits "
    "(`tc qdisc`) and MTU (`ping -M do -s 1472 <other>`); NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME choose a faster network.",
)
NCCL_BETWEEN = Way(
    "nccl_between",
    COLLECTIVE,
    "NCCL",
    "NCCL moves ",
    "See network.infiniband and `ibstat` on both; NCCL_DEBUG=INFO prints the adapter or TCP.",
)
NCCL_WITHIN = Way(
    "nccl_within",
    COLLECTIVE,
    "NCCL within nodes",
    "NCCL moves ",
    "See `nvidia-smi topo -m`, `nvidia-smi nvlink -s`, and P2P or SHM in NCCL_DEBUG=INFO.",
)


def tournament(players: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
    """Return rounds of disjoint pairs, each two players once (the circle method)."""
    ring = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def rounds_between(nodes: Sequence[Sequence[int]]) -> list[Round]:
    """Pair the first ranks of all nodes, both ways."""
    return _both_ways(tournament([ranks[0] for ranks in nodes]))


def rounds_within(nodes: Sequence[Sequence[int]]) -> list[Round]:
    """Pair all ranks of a node, on all nodes at a time, both ways."""
    by_round = zip_longest(*map(tournament, nodes), fillvalue=[])
    return _both_ways([[pair for pairs in each for pair in pairs] for each in by_round])


def _both_ways(rounds: Sequence[Round]) -> list[Round]:
    return [way for one in rounds if one for way in (one, [(b, a) for a, b in one])]


def suspects(speeds: Mapping[P, Speed]) -> list[P]:
    """Return the slow pairs, slowest first."""
    if not speeds:
        return []
    typical = typical_of(speeds)
    least = max(SLOW * typical.bytes_per_s, LEAST_BYTES_PER_S)
    longest = max(typical.round_trip_s / SLOW, LEAST_ROUND_TRIP_S)
    return [
        pair
        for pair, speed in sorted(speeds.items(), key=lambda item: item[1].bytes_per_s)
        if speed.bytes_per_s < least or speed.round_trip_s > longest
    ]


def typical_of(speeds: Mapping[Any, Speed]) -> Speed:
    """Return the medians of all pairs; of two pairs, the faster."""
    return Speed(
        statistics.median_low(speed.round_trip_s for speed in speeds.values()),
        statistics.median_high(speed.bytes_per_s for speed in speeds.values()),
    )


def judge_pairs(way: Way, speeds: Mapping[Pair, Speed]) -> list[Finding]:
    """Return a finding for each slow pair of nodes, or of GPUs ('a GPU 0') of a node."""
    typical, findings = typical_of(speeds), []
    longest = max(typical.round_trip_s / BROKEN, LONG_ROUND_TRIP_S)
    for pair in suspects(speeds)[:MAX_SHOWN]:
        speed, places = speeds[pair], " -> ".join(pair)
        is_broken = speed.bytes_per_s < BROKEN * typical.bytes_per_s or speed.round_trip_s > longest
        evidence = f"{way.prefix}{speed}, {places}; the median of all pairs is {typical}"
        nodes = " -> ".join(dict.fromkeys(place.partition(OF_NODE)[0] for place in pair))
        findings.append((fail if is_broken else warn)(way.check, nodes, evidence, way.advice))
    return findings


def extremes(speeds: Mapping[Pair, Speed]) -> str:
    """Describe the pair with the lowest bandwidth, and the one with the longest round trip."""
    slowest = min(speeds, key=lambda pair: speeds[pair].bytes_per_s)
    farthest = max(speeds, key=lambda pair: speeds[pair].round_trip_s)
    rate = str(speeds[slowest]).partition(",")[0]
    return (
        f"at least {rate} ({' -> '.join(slowest)}), round trip at most "
        f"{1e3 * speeds[farthest].round_trip_s:.3f} ms ({' -> '.join(farthest)})"
    )


def judge_bandwidth(speeds: Mapping[Pair, Speed]) -> list[Finding]:
    """Judge network.bandwidth by the speeds between nodes over gloo."""
    summary = f"{len(speeds)} pairs: median {typical_of(speeds)}; {extremes(speeds)}"
    first, *others = judge_pairs(GLOO, speeds) or [ok(BANDWIDTH, "all", summary)]
    return [replace(first, tables={GLOO.title: matrix(speeds)}), *others]


def matrix(speeds: Mapping[Pair, Speed]) -> Matrix:
    """Return speeds by sender, then by receiver."""
    rows: dict[str, dict[str, Mapping[str, float]]] = {}
    for (sender, receiver), speed in speeds.items():
        rows.setdefault(sender, {})[receiver] = speed._asdict()
    return rows
