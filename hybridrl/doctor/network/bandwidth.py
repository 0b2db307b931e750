"""Check network.bandwidth: speed of each ordered pair of nodes against the median.

One TCP stream per pair, as in gloo: it compares pairs, but does not saturate a fast network. Pairs
are measured in rounds, with one partner for each node.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.context import gather_each
from hybridrl.doctor.findings import Finding, Matrix, fail, ok, skipped, warn
from hybridrl.doctor.network.server import Opened, Speed, Target, measure

CHECK = "network.bandwidth"
TABLE = "one TCP stream"
PAIR_S = 0.4
MAX_BYTES = 64 * 2**20
# Seconds for all rounds; with many nodes each pair gets less.
ALL_ROUNDS_S = 8.0
LEAST_PAIR_S = 0.05
# Shares of the median. Below half a pair is slower than load explains: a warning. Below a tenth it
# uses another route (a management network, a degraded link) and slows every collective: a failure.
SLOW, BROKEN = 0.5, 0.1
# Round trips below these pass without a warning, or without a failure.
LEAST_ROUND_TRIP_S, LONG_ROUND_TRIP_S = 1e-3, 10e-3
# Half of Gigabit Ethernet, which carries 118 MB/s: less is a fault even if all pairs are equal.
LEAST_BYTES_PER_S = 50e6
MAX_SHOWN = 20
ADVICE = (
    "On both, see link (`ethtool <interface>`, `ip -s link`), route (`ip route get`) and limits "
    "(`tc qdisc`); NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose a faster network."
)

Pair = tuple[str, str]


def check(
    agents: NodeProbes, opened: Mapping[str, Opened], addresses: Mapping[str, str]
) -> list[Finding]:
    """Measure all pairs, and the slow ones a second time without other traffic."""
    nodes, found = list(opened), list[Finding]()
    speeds: dict[Pair, Speed] = {}
    rounds = tournament(nodes)
    seconds = min(PAIR_S, max(LEAST_PAIR_S, ALL_ROUNDS_S / (2 * max(1, len(rounds)))))

    def measure_pairs(pairs: Sequence[Pair]) -> None:
        """Keep the better values of two measurements, to exclude other load."""
        arguments = {}
        for node, other in pairs:
            target = Target(other, addresses[other], opened[other].chosen, opened[other].token)
            arguments[node] = (target, seconds, MAX_BYTES)
        measured, silent = gather_each(agents, CHECK, measure, arguments, seconds + 10.0)
        for pair in pairs:
            if pair[0] in measured:
                new: Speed = measured[pair[0]]
                old = speeds.get(pair, new)
                rates = new.bytes_per_s, old.bytes_per_s
                speeds[pair] = Speed(min(new.round_trip_s, old.round_trip_s), max(rates))
        found.extend(silent)

    if len(nodes) == 1:
        return [skipped(CHECK, "all", "there is one node")]
    for pairs in rounds:
        measure_pairs(pairs)
        measure_pairs([(b, a) for a, b in pairs])
    for pair in list(suspects(speeds))[:MAX_SHOWN]:
        measure_pairs([pair])
    return found + (judge(speeds) if speeds else [])


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


def rounds_of(nodes: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Pair all ranks of a node, on all nodes at a time, then the nodes' first ranks; both ways."""
    within = zip_longest(*map(tournament, nodes), fillvalue=[])
    rounds = [[pair for pairs in side_by_side for pair in pairs] for side_by_side in within]
    rounds += tournament([ranks[0] for ranks in nodes])
    return [way for one in rounds if one for way in (one, [(b, a) for a, b in one])]


def suspects(speeds: Mapping[Pair, Speed]) -> dict[Pair, Speed]:
    """Return the slow pairs, slowest first."""
    if not speeds:
        return {}
    typical = typical_of(speeds)
    least = max(SLOW * typical.bytes_per_s, LEAST_BYTES_PER_S)
    longest = max(typical.round_trip_s / SLOW, LEAST_ROUND_TRIP_S)
    return {
        pair: speed
        for pair, speed in sorted(speeds.items(), key=lambda item: item[1].bytes_per_s)
        if speed.bytes_per_s < least or speed.round_trip_s > longest
    }


def typical_of(speeds: Mapping[Pair, Speed]) -> Speed:
    """Return the medians of all pairs; of two pairs, the faster."""
    return Speed(
        statistics.median_low(speed.round_trip_s for speed in speeds.values()),
        statistics.median_high(speed.bytes_per_s for speed in speeds.values()),
    )


def slow_pairs(
    speeds: Mapping[Pair, Speed], text: Callable[[Speed], str]
) -> Iterator[tuple[Pair, Callable[..., Finding], str, str]]:
    """Yield the slow pairs with the severity, and the texts of their speed and of the median."""
    typical = typical_of(speeds)
    longest = max(typical.round_trip_s / BROKEN, LONG_ROUND_TRIP_S)
    for pair, speed in suspects(speeds).items():
        another_route = speed.bytes_per_s < BROKEN * typical.bytes_per_s
        judged = fail if another_route or speed.round_trip_s > longest else warn
        yield pair, judged, text(speed), f"the median of all pairs is {text(typical)}"


def extremes(speeds: Mapping[Pair, Speed]) -> tuple[Pair, Pair]:
    """Return the pair with the lowest bandwidth, and the one with the longest round trip."""
    return (
        min(speeds, key=lambda pair: speeds[pair].bytes_per_s),
        max(speeds, key=lambda pair: speeds[pair].round_trip_s),
    )


def judge(speeds: Mapping[Pair, Speed]) -> list[Finding]:
    """Judge the speeds of ordered pairs of nodes."""
    found = [
        judged(CHECK, " -> ".join(pair), f"{speed}; {median}", ADVICE)
        for pair, judged, speed, median in islice(slow_pairs(speeds, _text), MAX_SHOWN)
    ]
    slowest, farthest = extremes(speeds)
    summary = (
        f"{len(speeds)} pairs: median {_text(typical_of(speeds))}; least "
        f"{_rate(speeds[slowest].bytes_per_s)} ({' -> '.join(slowest)}), round trip at most "
        f"{1e3 * speeds[farthest].round_trip_s:.2f} ms ({' -> '.join(farthest)})"
    )
    first, *others = found or [ok(CHECK, "all", summary)]
    return [replace(first, tables={TABLE: matrix(speeds)}), *others]


def matrix(speeds: Mapping[Pair, Speed]) -> Matrix:
    """Return speeds by sender, then by receiver."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for (sender, receiver), speed in speeds.items():
        found.setdefault(sender, {})[receiver] = speed._asdict()
    return found


def _text(speed: Speed) -> str:
    return f"{_rate(speed.bytes_per_s)}, round trip {1e3 * speed.round_trip_s:.2f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s"
