"""Can every node connect to every other, on the ports that a run uses?"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.network.ray import running_services
from hybridrl.doctor.network.server import Opened, Target, reach

CHECK = "network.ports"
# Seconds for all connections of a node, and how many more each second is enough for.
WITHIN_S, PER_SECOND = 4.0, 500
# More pairs than these are counted, not shown.
MAX_SHOWN = 20


class Attempt(NamedTuple):
    """A connection from one node to a port of another; `problem` is empty where it came about."""

    source: str
    target: Target
    problem: str


def check(
    agents: NodeProbes,
    opened: Mapping[str, Opened],
    addresses: Mapping[str, str],
    meeting: Mapping[str, str],
) -> list[Finding]:
    """Connect every node to every other, all at the same time.

    Args:
        agents: the nodes.
        opened: what they listen on.
        addresses: by which the others know a node.
        meeting: by which they reach its port of the rendezvous.
    """
    of_node = _targets(opened, addresses, meeting)
    targets = {
        node: [
            target
            for other, those in of_node.items()
            if other != node or len(opened) == 1
            for target in those
        ]
        for node in opened
    }
    results, findings = heard(CHECK, reach_all(agents, targets))
    attempts = [
        Attempt(node, target, problem)
        for node, problems in results.items()
        for target, problem in zip(targets[node], problems, strict=True)
    ]
    return findings + judge(attempts, opened, addresses) + judge_taken(opened)


def reach_all(agents: NodeProbes, targets: Mapping[str, list[Target]]) -> dict[str, ProbeResult]:
    """What went wrong with the connections of each node, made at the same time (`reach`)."""
    within_s = WITHIN_S + max(map(len, targets.values())) / PER_SECOND
    arguments = {node: (those, within_s) for node, those in targets.items()}
    return agents.call_each(reach, arguments, within_s + 10.0)


def _targets(
    opened: Mapping[str, Opened], addresses: Mapping[str, str], meeting: Mapping[str, str]
) -> dict[str, list[Target]]:
    """What the others connect to on each node."""
    running = running_services({node: addresses[node] for node in opened})
    return {
        node: [
            *(
                Target(node, address, port, ports.token)
                for address, port in (
                    (meeting[node], ports.rendezvous),
                    (addresses[node], ports.worker),
                    (addresses[node], ports.chosen),
                    *((addresses[node], port) for port in ports.services),
                )
                if port is not None
            ),
            *(
                Target(node, addresses[node], service.port, "", service.name)
                for service in running[node]
            ),
        ]
        for node, ports in opened.items()
    }


def judge_taken(opened: Mapping[str, Opened]) -> list[Finding]:
    """A warning for each node where Ray's services could not have their ports."""
    return [
        warn(
            CHECK,
            node,
            f"{', '.join(ports.taken)}: deploy/ would give that to Ray",
            "Set HYBRIDRL_RAY_PORT to the first of eight ports that are free on all nodes, or end "
            f"who holds it (`ss -ltnp` on {node}). With a Ray that is up: set RAY_ADDRESS.",
        )
        for node, ports in opened.items()
        if ports.taken
    ]


def judge(
    attempts: Sequence[Attempt], opened: Mapping[str, Opened], addresses: Mapping[str, str]
) -> list[Finding]:
    """Findings from all connections that were tried."""
    broken: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.problem:
            broken[attempt.source, attempt.target.node].append(attempt)
    findings = [
        _judge_pair(failures, opened[target], addresses, (target, source) in broken)
        for (source, target), failures in list(broken.items())[:MAX_SHOWN]
    ]
    if len(broken) > MAX_SHOWN:
        rest = f"and {len(broken) - MAX_SHOWN} more pairs of nodes that do not reach each other"
        findings.append(fail(CHECK, "all", rest, "Mend the pairs above first; doctor.json."))
    if findings:
        return findings
    ports = sorted({str(one.target.port) for one in attempts if not one.target.service})
    services = sorted({one.target.service for one in attempts if one.target.service})
    what = "one node, connected to itself" if len(opened) == 1 else f"{len(opened)} nodes"
    what += f": {len(attempts)} connections on ports {', '.join(ports)}"
    return [ok(CHECK, "all", f"{what}; {' and '.join(services)}" if services else what)]


def _judge_pair(
    failures: Sequence[Attempt], target: Opened, addresses: Mapping[str, str], both_ways: bool
) -> Finding:
    source, to = failures[0].source, failures[0].target.node
    what = "; ".join(
        f"{addresses[source]} -> {attempt.target.address} {_port(attempt.target)}: "
        f"{attempt.problem}"
        for attempt in failures
    )
    direction = "in both directions" if both_ways else "in this direction alone"
    return fail(CHECK, f"{source} -> {to}", f"{what}; {direction}", _advice(failures, target))


def _port(target: Target) -> str:
    return f"port {target.port}{f' ({target.service})' if target.service else ''}"


def _advice(failures: Sequence[Attempt], target: Opened) -> str:
    address, to = failures[0].target.address, failures[0].target.node
    low, high = target.ephemeral
    ports = {failure.target.port for failure in failures}
    ray_processes = {failure.target.port for failure in failures if failure.target.service}
    if ports == ray_processes:
        return (
            "Ray's nodes pass tasks and batches to each other there, and a run hangs at the first "
            f"that cannot pass: open these ports on {to} for the other nodes, or start Ray with "
            "--node-manager-port and --object-manager-port on open ones."
        )
    if ports == {target.rendezvous}:
        return (
            f"Other ports of {to} answer: open the ports of cluster.rendezvous_ports for the other "
            f"nodes in its firewall (`iptables -I INPUT -p tcp --dport {target.rendezvous} -j "
            "ACCEPT`; clouds: the security group), or set cluster.rendezvous_ports to open ones."
        )
    if ports == {target.worker}:
        first, last = target.worker_ports
        return (
            f"Ray's workers listen on ports {first} to {last}: open "
            f"them on {to} for the other nodes, or start Ray with --min-worker-port and "
            "--max-worker-port around open ones."
        )
    if ports <= set(target.services):
        return (
            f"Ray's services listen on ports {target.services[0]} to {target.services[-1]} where "
            f"deploy/ starts them: open them on {to} for the other nodes, or set HYBRIDRL_RAY_PORT "
            "to the first of eight open ones."
        )
    of_kernel = {port for port in ray_processes if low <= port <= high}
    if ports - of_kernel == {target.chosen} and target.rendezvous is not None:
        return (
            f"NCCL and gloo listen on ports of {low} to {high} (ip_local_port_range), as do the "
            f"services of a Ray that is told nothing: open all TCP ports of {to} for the other "
            "nodes, in its firewall and in the security group."
        )
    return (
        f"On {failures[0].source}, `ip route get {address}` says which way packets take and "
        f"`nc -vz {address} {max(ports)}` tries it. Add the route, open all TCP ports between the "
        "nodes in firewalls and security groups, or start Ray with --node-ip-address in a network "
        "that all nodes share."
    )
