"""How fast is the network between each two nodes, each way, and which pairs are slower?

One TCP stream per pair, as gloo uses: for comparing pairs, not the most that a fast network can
carry. Pairs are measured in rounds, in which each node talks to one other.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.findings import Finding, Matrix, fail, ok, warn
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.network.server import Opened, Speed, Target, measure

CHECK = "network.bandwidth"
TABLE = "one TCP stream"
PAIR_S = 0.4
MAX_BYTES = 64 * 2**20
# Seconds for all rounds; pairs get less where there are many nodes.
ALL_ROUNDS_S = 8.0
LEAST_PAIR_S = 0.05
# A pair below half of the median is slower than load explains: told. One below a tenth takes
# another way than the rest (a management network, a link that fell back): every collective waits
# for it, and the run would be several times slower without a word; hence a failure.
SLOW, BROKEN = 0.5, 0.1
# Round trips are held against the median alike, but for those that load explains.
LEAST_ROUND_TRIP_S, LONG_ROUND_TRIP_S = 1e-3, 10e-3
# Gigabit Ethernet carries 118 MB/s; less than half of it is a fault where pairs are all alike, too.
LEAST_BYTES_PER_S = 50e6
MAX_SHOWN = 20

Pair = tuple[str, str]


def check(
    agents: NodeProbes, opened: Mapping[str, Opened], addresses: Mapping[str, str]
) -> list[Finding]:
    """Measure all pairs, and the slow ones a second time, when nobody else talks."""
    nodes = list(opened)
    targets = {
        node: Target(node, addresses[node], ports.chosen, ports.token)
        for node, ports in opened.items()
    }
    if len(nodes) == 1:
        speeds, findings = _measure(agents, [(nodes[0], nodes[0])], targets, PAIR_S)
        return findings or [ok(CHECK, "all", f"one node, to itself: {_text(speeds.popitem()[1])}")]
    speeds, findings = {}, []
    rounds = tournament(nodes)
    seconds = min(PAIR_S, max(LEAST_PAIR_S, ALL_ROUNDS_S / (2 * len(rounds))))
    for pairs in rounds:
        for way in (pairs, [(b, a) for a, b in pairs]):
            more, failures = _measure(agents, way, targets, seconds)
            speeds |= more
            findings += failures
    for pair in list(suspects(speeds))[:MAX_SHOWN]:
        again, _ = _measure(agents, [pair], targets, seconds)
        speeds |= {p: _better(s, speeds[p]) for p, s in again.items()}
    return findings + (judge(speeds) if speeds else [])


def tournament(nodes: Sequence[str]) -> list[list[Pair]]:
    """Rounds of disjoint pairs in which each two nodes meet once (the circle method)."""
    ring: list[str | None] = [*nodes]
    if len(ring) % 2:
        ring.append(None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def suspects(speeds: Mapping[Pair, Speed]) -> dict[Pair, Speed]:
    """The pairs that `judge` would name."""
    if not speeds:
        return {}
    least = max(SLOW * _median(speeds), LEAST_BYTES_PER_S)
    longest = max(_median_trip(speeds) / SLOW, LEAST_ROUND_TRIP_S)
    return {
        pair: speed
        for pair, speed in speeds.items()
        if speed.bytes_per_s < least or speed.round_trip_s > longest
    }


def typical_of(speeds: Mapping[Pair, Speed]) -> Speed:
    """The medians of all pairs."""
    return Speed(_median_trip(speeds), _median(speeds))


def is_broken(speed: Speed, typical: Speed) -> bool:
    """Whether a pair must take another way than the rest, which fails; else it is told."""
    is_far = speed.round_trip_s > max(typical.round_trip_s / BROKEN, LONG_ROUND_TRIP_S)
    return is_far or speed.bytes_per_s < BROKEN * typical.bytes_per_s


def judge(speeds: Mapping[Pair, Speed]) -> list[Finding]:
    """Findings from the speeds of ordered pairs of nodes."""
    typical = typical_of(speeds)
    slow = sorted(suspects(speeds).items(), key=lambda item: item[1].bytes_per_s)
    findings = [_judge_slow(pair, speed, typical) for pair, speed in slow[:MAX_SHOWN]]
    lowest = min(speeds, key=lambda pair: speeds[pair].bytes_per_s)
    slowest_trip = max(speeds, key=lambda pair: speeds[pair].round_trip_s)
    summary = (
        f"{len(speeds)} pairs: median {_text(typical)}; least "
        f"{_rate(speeds[lowest].bytes_per_s)} ({lowest[0]} -> {lowest[1]}), round trip at most "
        f"{1e3 * speeds[slowest_trip].round_trip_s:.2f} ms "
        f"({slowest_trip[0]} -> {slowest_trip[1]})"
    )
    first, *others = findings or [ok(CHECK, "all", summary)]
    return [replace(first, tables={TABLE: matrix(speeds)}), *others]


def matrix(speeds: Mapping[Pair, Speed]) -> Matrix:
    """Speeds by sender, then by receiver."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for (sender, receiver), speed in speeds.items():
        found.setdefault(sender, {})[receiver] = speed._asdict()
    return found


def _judge_slow(pair: Pair, speed: Speed, typical: Speed) -> Finding:
    node = f"{pair[0]} -> {pair[1]}"
    evidence = f"{_text(speed)}; the median of all pairs is {_text(typical)}"
    advice = (
        f"On both, see the link's speed and errors (`ethtool <interface>`, `ip -s link`), the way "
        f"packets take (`ip route get`) and rate limits (`tc qdisc`); a faster network that both "
        f"have is taken with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME. Or leave {pair[1]} out."
    )
    return (fail if is_broken(speed, typical) else warn)(CHECK, node, evidence, advice)


def _measure(
    agents: NodeProbes, pairs: Sequence[Pair], targets: Mapping[str, Target], seconds: float
) -> tuple[dict[Pair, Speed], list[Finding]]:
    partner = dict(pairs)
    arguments = {node: (targets[other], seconds, MAX_BYTES) for node, other in pairs}
    speeds, findings = heard(CHECK, agents.call_each(measure, arguments, seconds + 10.0))
    return {(node, partner[node]): speed for node, speed in speeds.items()}, findings


def _median(speeds: Mapping[Pair, Speed]) -> float:
    """The upper one of two: with two nodes, the slower way is held against the faster."""
    return statistics.median_high(speed.bytes_per_s for speed in speeds.values())


def _median_trip(speeds: Mapping[Pair, Speed]) -> float:
    return statistics.median_low(speed.round_trip_s for speed in speeds.values())


def _better(one: Speed, other: Speed) -> Speed:
    """What no other load has disturbed, of two measurements of a pair."""
    shorter = min(one.round_trip_s, other.round_trip_s)
    return Speed(shorter, max(one.bytes_per_s, other.bytes_per_s))


def _text(speed: Speed) -> str:
    return f"{_rate(speed.bytes_per_s)}, round trip {1e3 * speed.round_trip_s:.2f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s"
