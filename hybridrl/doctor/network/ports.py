"""Checks network.ports, network.interfaces (of NCCL and gloo) and network.rendezvous."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.findings import Finding, Verdict, fail, ok, warn
from hybridrl.doctor.network.nodes import Choice, NodeView, choices_of, nccl_choice
from hybridrl.doctor.network.server import Opened, Target, reach, running_services
from hybridrl.doctor.stages import gather_each

CHECK, RENDEZVOUS, INTERFACES = "network.ports", "network.rendezvous", "network.interfaces"
IN_A_FILE = "ranks of one node meet in a file of their user, without a port"
# Seconds for all connections of a node, plus one second for this many connections.
WITHIN_S, PER_SECOND = 4.0, 500
MAX_SHOWN, MAX_HOLDERS = 20, 4


class Attempt(NamedTuple):
    """A connection from a node to a target on another; `problem` is empty if it succeeded."""

    source: str
    target: Target
    problem: str


def connect(
    agents: NodeProbes,
    opened: Mapping[str, Opened],
    addresses: Mapping[str, str],
    meeting: Mapping[str, str],
    choices: Mapping[str, Sequence[Choice]],
) -> tuple[list[Attempt], list[Finding]]:
    """Connect every node to every other at the same time.

    `meeting` has the addresses of rendezvous ports, `choices` the interfaces of their own that
    NCCL and gloo will use.
    """
    running = running_services({node: addresses[node] for node in opened})
    targets = []
    for node, ports in opened.items():
        own, token = addresses[node], ports.token
        listening = [(meeting[node], ports.rendezvous)]
        listening += [(own, port) for port in (ports.worker, ports.chosen, *ports.services)]
        targets += [Target(node, a, port, token) for a, port in listening if port is not None]
        targets += [Target(node, own, port, "", name) for name, port in running[node]]
        for choice, port in zip(choices[node], ports.of_choices, strict=True):
            targets.append(Target(node, choice.address, port, token, choice=choice))
    alone = len(opened) == 1
    tried = {node: [one for one in targets if alone or one.node != node] for node in opened}
    within_s = WITHIN_S + max(map(len, tried.values())) / PER_SECOND
    arguments = {node: (those, within_s) for node, those in tried.items()}
    problems, findings = gather_each(agents, CHECK, reach, arguments, within_s + 10.0)
    attempts = [
        Attempt(node, target, problem)
        for node, texts in problems.items()
        for target, problem in zip(tried[node], texts, strict=True)
    ]
    return attempts, findings


def shortened(findings: Sequence[Finding]) -> list[Finding]:
    """Keep the first findings, and count the others in one more."""
    shown, rest = list(findings[:MAX_SHOWN]), findings[MAX_SHOWN:]
    if rest:
        evidence = f"and {len(rest)} more pairs or nodes without a connection"
        advice = "Repair those above first."
        shown.append(replace(rest[0], node="all", evidence=evidence, advice=advice))
    return shown


def judge(
    attempts: Sequence[Attempt],
    opened: Mapping[str, Opened],
    addresses: Mapping[str, str],
) -> list[Finding]:
    """Judge connections to nodes' own addresses, and who holds the ports of Ray's services."""
    findings = _judge_attempts(attempts, opened, addresses)
    for node, ports in opened.items():
        if ports.taken:
            evidence = f"{', '.join(ports.taken)}, which deploy/ would give to Ray"
            advice = "Set HYBRIDRL_RAY_PORT to the first of eight free ports, or end their holder"
            findings.append(warn(CHECK, node, evidence, f"{advice}; if Ray is up, set RAY_ADDRESS"))
    return findings


def _judge_attempts(
    attempts: Sequence[Attempt],
    opened: Mapping[str, Opened],
    addresses: Mapping[str, str],
) -> list[Finding]:
    """Return a failure for each pair of nodes, or one ok."""
    broken: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    own = [attempt for attempt in attempts if attempt.target.choice is None]
    for attempt in own:
        if attempt.problem:
            broken[attempt.source, attempt.target.node].append(attempt)
    findings = []
    for (source, to), failures in broken.items():
        each = "; ".join(
            f"{addresses[source]} -> {one.target.address} port {one.target.port}"
            f"{f' ({one.target.service})' if one.target.service else ''}: {one.problem}"
            for one in failures
        )
        way = "in both directions" if (to, source) in broken else "in this direction alone"
        advice = _advice(source, [one.target for one in failures], opened[to])
        findings.append(fail(CHECK, f"{source} -> {to}", f"{each}; {way}", advice))
    if findings:
        return shortened(findings)
    ports = sorted({str(one.target.port) for one in own if not one.target.service})
    services = sorted({one.target.service for one in own if one.target.service})
    what = "one node, connected to itself" if len(opened) == 1 else f"{len(opened)} nodes"
    what += f": {len(own)} connections on ports {', '.join(ports)}"
    return [ok(CHECK, "all", f"{what}; {' and '.join(services)}" if services else what)]


def _advice(source: str, failed: Sequence[Target], opened: Opened) -> str:
    """Return the remedy for the unreachable ports of one node: the first that applies."""
    address, to = failed[0].address, failed[0].node
    low, high = opened.ephemeral
    first, last = opened.worker_ports
    services = [*opened.services] or [0]
    ports = {target.port for target in failed}
    of_ray = {target.port for target in failed if target.service}
    of_kernel = {port for port in of_ray if low <= port <= high}
    only_kernel = ports - of_kernel == {opened.chosen} and opened.rendezvous is not None
    other = f"open these ports on {to} for the other nodes, or"
    table = (
        (
            ports == of_ray,
            f"Ray needs these ports: {other} start it with --node-manager-port and "
            "--object-manager-port on open ones.",
        ),
        (
            ports == {opened.rendezvous},
            f"Open cluster.rendezvous_ports in the firewall of {to} (`iptables -I INPUT -p tcp "
            f"--dport {opened.rendezvous} -j ACCEPT`), or set others.",
        ),
        (
            ports == {opened.worker},
            f"Ray's workers listen on ports {first} to {last}: {other} start Ray with "
            "--min-worker-port and --max-worker-port around open ones.",
        ),
        (
            ports <= {*services},
            f"Ray's services listen on ports {min(services)} to {max(services)} under deploy/: "
            f"{other} set HYBRIDRL_RAY_PORT to the first of eight open ones.",
        ),
        (
            only_kernel,
            f"NCCL, gloo and Ray listen on ports {low} to {high} (ip_local_port_range): open all "
            f"TCP ports of {to} for the other nodes.",
        ),
    )
    route = (
        f"On {source}, `ip route get {address}` prints the route and `nc -vz {address} "
        f"{max(ports)}` tries it. Open all TCP ports, or start Ray with --node-ip-address in a "
        "network of all nodes."
    )
    return next((advice for applies, advice in table if applies), route)


def judge_rendezvous(
    node: str, opened: Opened, wanted: tuple[int, int], band: range, given: int | None
) -> Finding:
    """Judge network.rendezvous: rank 0's node for a band of ports; `given` is MASTER_PORT."""
    (low, high), port = opened.ephemeral, opened.rendezvous
    holders = ", ".join(opened.holders[:MAX_HOLDERS]) or "/proc does not show who holds them"
    name, setting = "cluster.rendezvous_ports", "Set cluster.rendezvous_ports=[first,last] to free"
    if given is not None:
        name, setting = "MASTER_PORT", "Unset MASTER_PORT (the run finds a port), or set it to free"
    if port is None:
        evidence = f"{opened.problem.partition(chr(10))[0]}; {holders}"
        advice = f"{setting} ports, or end their holder (`ss -ltnp` on {node})."
        return fail(RENDEZVOUS, node, evidence, advice)
    free = f"port {port} is free{f' ({holders})' if port != band[0] else ''}"
    if low <= port <= high:
        evidence = f"{free}, but in ip_local_port_range ({low} to {high}), from which the kernel "
        evidence += "may give it to any connection before the run listens"
        advice = f"Set {name} outside of {low} to {high}, or reserve the ports: sysctl -w "
        advice += f"net.ipv4.ip_local_reserved_ports={band[0]}-{band[-1]}."
        return warn(RENDEZVOUS, node, evidence, advice)
    if given is None and (band[0], band[-1]) != wanted:
        free += f"; the kernel uses some of cluster.rendezvous_ports ({wanted[0]} to {wanted[1]}): "
        free += f"ip_local_port_range is {low} to {high}"
    return ok(RENDEZVOUS, node, free)


def judge_interfaces(
    views: Mapping[str, NodeView],
    attempts: Sequence[Attempt] = (),
    addresses: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Judge the interfaces of all nodes, and the attempts to connect to `choices`."""
    findings = []
    for node, view in views.items():
        absent = [choice for choice in choices_of(node, view) if not choice.address]
        for name in dict.fromkeys(one.variable for one in absent if one.value is not None):
            evidence = f"{name}={view.variables[name]} names no interface of this node; it has "
            evidence += view.describe()
            outward = next(iter(view.outward), "eth0")
            advice = f"Unset {name}, or export {name}={outward} on this node before `ray start`."
            findings.append(fail(INTERFACES, node, evidence, advice))
    of_choices = [attempt for attempt in attempts if attempt.target.choice is not None]
    findings += _judge_choices(of_choices, views, addresses or {})
    if findings:
        return findings
    used = [f"NCCL uses {', '.join(f'{n} {nccl_choice(view)}' for n, view in views.items())}"]
    if gloo := [f"{n} {name}" for n, view in views.items() for name in view.gloo_names]:
        used.append(f"gloo uses {', '.join(gloo)}")
    if of_choices:
        used.append(f"{len(of_choices)} connections to interfaces of their own")
    used += [f"{node}: {view.describe()}" for node, view in views.items()]
    return [ok(INTERFACES, "all", "; ".join(used))]


def _judge_choices(
    attempts: Sequence[Attempt], views: Mapping[str, NodeView], addresses: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each unreachable choice, or for each pair if some nodes reach it."""
    by_choice: dict[Choice, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: [*views].index(one.target.node)):
        assert attempt.target.choice is not None
        by_choice[attempt.target.choice].append(attempt)
    findings = []
    for choice, those in by_choice.items():
        broken = [attempt for attempt in those if attempt.problem]
        groups = {f"{a.source} -> {choice.node}": [a] for a in broken}
        if len(broken) == len(those):
            groups = {choice.node: broken}
        view, known_by = views[choice.node], addresses[choice.node]
        findings += [
            _unreached(choice, about, group, view, known_by) for about, group in groups.items()
        ]
    return shortened(sorted(findings, key=lambda finding: finding.verdict is not Verdict.fail))


def _unreached(
    choice: Choice, about: str, attempts: Sequence[Attempt], view: NodeView, known_by: str
) -> Finding:
    """Return a failure if a variable names the interface, else a warning."""
    sources: dict[str, list[str]] = defaultdict(list)
    for attempt in attempts:
        sources[attempt.problem].append(attempt.source)
    tried = "; ".join(f"from {', '.join(nodes)}: {problem}" for problem, nodes in sources.items())
    leading = view.interface_of(known_by)
    advice = f"Make {choice.address} reachable (`ip route get`; docker run --network=host)"
    if leading not in (None, choice.interface):
        advice = f"On {choice.node}, export {choice.variable}={leading} before `ray start`, as the "
        advice += f"others know the node by its address {known_by}"
    reason = f"{choice.variable}={choice.value}"
    if choice.value is None:
        reason = f"NCCL uses {choice.interface} by default"
    evidence = (
        f"{reason}: {choice.interface} of {choice.node} is not reached at {choice.address} "
        f"{tried}; it has {view.describe()}"
    )
    return (warn if choice.value is None else fail)(INTERFACES, about, evidence, advice)
