"""Which interfaces would NCCL and gloo take on each node, and do the others reach them there?

What the others connect to is the interface's own address, which may be another than Ray's: each
node listens on it, and all others try.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.findings import Finding, Verdict, fail, ok, warn
from hybridrl.doctor.host.stage import heard
from hybridrl.doctor.network.choices import (
    LAST_CHOICES,
    Choice,
    choices_of,
    named_for_gloo,
    nccl_choice,
    unusable_variables,
)
from hybridrl.doctor.network.nodes import NodeView
from hybridrl.doctor.network.ports import reach_all
from hybridrl.doctor.network.server import Target, answer_on, close_ports

CHECK = "network.interfaces"
OPEN_S = 15.0
# More than these are counted, not shown.
MAX_SHOWN = 20


class Attempt(NamedTuple):
    """A connection from a node to another's choice; `problem` is empty where it came about."""

    source: str
    choice: Choice
    problem: str


def check(agents: NodeProbes, views: Mapping[str, NodeView]) -> list[Finding]:
    """Connect all nodes to the interfaces that are taken, where those have addresses of their own.

    Those with the address by which Ray knows the node are left to network.ports.
    """
    choices = [
        choice
        for node, view in views.items()
        for choice in choices_of(node, view, between_hosts=_hosts(views) > 1)
        if choice.address != agents.addresses[node]
    ]
    if not choices or len(views) == 1:
        return judge(views)
    attempts, findings = _connect(agents, list(views), choices)
    return findings + judge(views, attempts, agents.addresses)


def judge(
    views: Mapping[str, NodeView],
    attempts: Sequence[Attempt] = (),
    addresses: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Findings from the interfaces of all nodes.

    Args:
        views: by node.
        attempts: connections to interfaces that have addresses of their own.
        addresses: by which the others know a node; not needed without attempts.
    """
    named = [
        finding
        for node, view in views.items()
        for finding in _judge_named(node, view, between_hosts=_hosts(views) > 1)
    ]
    named += _judge_attempts(attempts, views, addresses or {})
    return named or [_judge_subnets(views, len(attempts))]


def open_at(addresses: Sequence[str]) -> tuple[str, list[int]]:
    """Listen on these addresses of this node; the token of the greetings and the ports."""
    listeners = [listen(address, [0]) for address in addresses]
    return answer_on(listeners), [int(one.getsockname()[1]) for one in listeners]


def _hosts(views: Mapping[str, NodeView]) -> int:
    return len({view.host_name for view in views.values()})


def _connect(
    agents: NodeProbes, nodes: Sequence[str], choices: Sequence[Choice]
) -> tuple[list[Attempt], list[Finding]]:
    """Try every choice from all other nodes, at the same time."""
    by_node: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_node[choice.node].append(choice)
    listening = {node: ([c.address for c in those],) for node, those in by_node.items()}
    opened, findings = heard(CHECK, agents.call_each(open_at, listening, OPEN_S))
    try:
        targets = [
            (choice, Target(node, choice.address, port, token))
            for node, (token, ports) in opened.items()
            for choice, port in zip(by_node[node], ports, strict=True)
        ]
        tried = {node: [one for one in targets if one[0].node != node] for node in nodes}
        answers = reach_all(agents, {node: [t for _, t in those] for node, those in tried.items()})
    finally:
        closing = {node: (token,) for node, (token, _) in opened.items()}
        agents.call_each(close_ports, closing, OPEN_S)
    problems, silent = heard(CHECK, answers)
    attempts = [
        Attempt(node, choice, problem)
        for node, those in problems.items()
        for (choice, _), problem in zip(tried[node], those, strict=True)
    ]
    return attempts, findings + silent


def _judge_attempts(
    attempts: Sequence[Attempt], views: Mapping[str, NodeView], addresses: Mapping[str, str]
) -> list[Finding]:
    """A finding for each choice that nobody reaches, and for each pair where others do."""
    order = list(views)
    by_choice: dict[Choice, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: order.index(one.choice.node)):
        by_choice[attempt.choice].append(attempt)
    found = []
    for choice, those in by_choice.items():
        broken = [attempt for attempt in those if attempt.problem]
        view, known_by = views[choice.node], addresses[choice.node]
        if len(broken) == len(those):
            found.append(_unreached(choice.node, broken, view, known_by))
        else:
            found += [
                _unreached(f"{a.source} -> {a.choice.node}", [a], view, known_by) for a in broken
            ]
    found.sort(key=lambda finding: finding.verdict is not Verdict.fail)
    if len(found) <= MAX_SHOWN:
        return found
    rest = f"and {len(found) - MAX_SHOWN} more that are not reached like these"
    more = replace(found[MAX_SHOWN], node="all", evidence=rest, advice="Mend those above first.")
    return [*found[:MAX_SHOWN], more]


def _unreached(about: str, attempts: Sequence[Attempt], view: NodeView, known_by: str) -> Finding:
    """A failure where the interface is named, else a warning: network.collective asks NCCL."""
    choice = attempts[0].choice
    sources: dict[str, list[str]] = defaultdict(list)
    for attempt in attempts:
        sources[attempt.problem].append(attempt.source)
    tried = "; ".join(f"from {', '.join(nodes)}: {problem}" for problem, nodes in sources.items())
    leading = view.interface_of(known_by)
    advice = (
        f"export {choice.variable}={leading}, the interface of {known_by} by which the others know "
        f"{choice.node}, or name one in a network that all nodes share; where names differ, set it "
        "on each node before `ray start`."
        if leading not in (None, choice.interface)
        else "The first address of the interface is told to the others: make it one that they "
        f"reach (`ip route get {choice.address}` there), in a container with the host's network "
        "(docker run --network=host); see network.address."
    )
    verdict = warn if choice.value is None else fail
    return verdict(
        CHECK,
        about,
        f"{choice.reason}: {choice.interface} of {choice.node} is not reached at {choice.address} "
        f"{tried}; it has {view.describe()}",
        advice,
    )


def _judge_named(node: str, view: NodeView, *, between_hosts: bool) -> list[Finding]:
    unusable = unusable_variables(view, between_hosts=between_hosts)
    return [_unusable(node, view, f"{name}={view.variables[name]}") for name in unusable]


def _unusable(node: str, view: NodeView, setting: str) -> Finding:
    name = setting.partition("=")[0]
    outward = next(iter(view.outward), "eth0")
    pattern = "with prefixes, NCCL_SOCKET_IFNAME=eth,en" if name.startswith("NCCL") else ""
    return fail(
        CHECK,
        node,
        f"{setting} names no interface of this node that leads to the others; it has "
        f"{view.describe()}",
        f"Unset {name}, or name one that every node has (here: export {name}={outward}); where "
        f"names differ, set it on each node before `ray start`{', or ' if pattern else ''}"
        f"{pattern}.",
    )


def _judge_subnets(views: Mapping[str, NodeView], connections: int) -> Finding:
    each = "; ".join(f"{node}: {view.describe()}" for node, view in views.items())
    if len(views) == 1:
        (view,) = views.values()
        return ok(CHECK, "all", f"one node: {each}; NCCL would take {nccl_choice(view)}")
    common = set.intersection(*(set(_subnets(view)) for view in views.values()))
    if not common and all(_routed_alone(view) for view in views.values()):
        return ok(CHECK, "all", f"addresses without a subnet, as clouds route them: {each}")
    if not common:
        return warn(
            CHECK,
            "all",
            f"no subnet has all nodes; between them traffic is routed, over gateways that may be "
            f"slow or drop packets. {each}",
            "See network.bandwidth for what the routes carry. Where the nodes share another "
            "network, bring its interfaces up and export NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME with their name (`ip -br addr` lists them).",
        )
    taken: dict[str, list[tuple[str, str | None]]] = {
        "NCCL": [(node, nccl_choice(view)) for node, view in views.items()],
        "gloo": [(node, name) for node, view in views.items() for name in named_for_gloo(view)],
    }
    astray = {
        library: [
            (node, name)
            for node, name in those
            if name is None or not common & set(_subnets(views[node], name))
        ]
        for library, those in taken.items()
    }
    if _hosts(views) > 1 and any(astray.values()):
        subnet = sorted(common)[0]
        names = sorted({_subnets(view)[subnet] for view in views.values()})
        return warn(
            CHECK,
            "all",
            f"{_those(astray, 'would take')}, outside of {subnet}, which has all nodes. {each}",
            f"export NCCL_SOCKET_IFNAME={','.join(names)} GLOO_SOCKET_IFNAME={names[0]} where the "
            "run is started.",
        )
    tried = f"; {connections} connections to interfaces of their own" if connections else ""
    where = ", ".join(sorted(common))
    return ok(CHECK, "all", f"all nodes are in {where}; {_those(taken, 'takes')}{tried}")


def _those(taken: Mapping[str, Sequence[tuple[str, str | None]]], verb: str) -> str:
    """'NCCL takes a eth0, b eth0; gloo takes a eth1'."""
    return "; ".join(
        f"{library} {verb} {', '.join(f'{node} {name}' for node, name in those)}"
        for library, those in taken.items()
        if those
    )


def _routed_alone(view: NodeView) -> bool:
    """Whether all its addresses are subnets of their own (/32), of which nothing can be said."""
    return all(
        ipaddress.ip_interface(subnet).network.num_addresses == 1 for subnet in _subnets(view)
    )


def _subnets(view: NodeView, only: str | None = None) -> dict[str, str]:
    """Interface by subnet, loopback and bridges of containers left out."""
    return {
        str(ipaddress.ip_interface(text).network): name
        for name, texts in view.interfaces.items()
        if not name.startswith(LAST_CHOICES) and only in (None, name)
        for text in texts
    }
