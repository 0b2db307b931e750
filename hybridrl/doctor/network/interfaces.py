"""Check network.interfaces: the interfaces of NCCL and gloo, and connections to them.

Peers connect to the interface's own address, which may differ from Ray's.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.findings import Finding, Rule, Verdict, fail, first, ok, warn, warns_if
from hybridrl.doctor.gather import gather_each
from hybridrl.doctor.network.nodes import (
    LAST_CHOICES,
    Choice,
    NodeView,
    choices_of,
    gloo_names,
    nccl_choice,
    unusable_variables,
)
from hybridrl.doctor.network.ports import reach_all
from hybridrl.doctor.network.server import Target, answer_on, close_ports

CHECK = "network.interfaces"
OPEN_S = 15.0
MAX_SHOWN = 20
# Node and interface (None: no interface) by library.
Used = Mapping[str, Sequence[tuple[str, str | None]]]


class Attempt(NamedTuple):
    """A connection from a node to another's choice; `problem` is empty if it succeeded."""

    source: str
    choice: Choice
    problem: str


def check(agents: NodeProbes, views: Mapping[str, NodeView]) -> list[Finding]:
    """Connect all nodes to each chosen interface with another address than the node.

    network.ports covers the address of the node in Ray.
    """
    choices = [
        choice
        for node, view in views.items()
        for choice in choices_of(node, view, between_hosts=_hosts(views) > 1)
        if choice.address != agents.addresses[node]
    ]
    if not choices or len(views) == 1:
        return judge(views)
    attempts, found = _connect(agents, list(views), choices)
    return found + judge(views, attempts, agents.addresses)


def judge(
    views: Mapping[str, NodeView],
    attempts: Sequence[Attempt] = (),
    addresses: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Judge the interfaces of all nodes, and the attempts to connect to them."""
    found = [
        _judge_unusable(node, view, name)
        for node, view in views.items()
        for name in unusable_variables(view, between_hosts=_hosts(views) > 1)
    ]
    found += _judge_attempts(attempts, views, addresses or {})
    return found or [_judge_subnets(views, len(attempts))]


def open_at(addresses: Sequence[str]) -> tuple[str, list[int]]:
    """Listen on these addresses of this node; return the token of the greetings and the ports."""
    listeners = [listen(address, [0]) for address in addresses]
    return answer_on(listeners), [int(one.getsockname()[1]) for one in listeners]


def _hosts(views: Mapping[str, NodeView]) -> int:
    return len({view.host_name for view in views.values()})


def _connect(
    agents: NodeProbes, nodes: Sequence[str], choices: Sequence[Choice]
) -> tuple[list[Attempt], list[Finding]]:
    """Connect to every choice from all other nodes, at the same time."""
    by_node: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_node[choice.node].append(choice)
    listening = {node: ([c.address for c in those],) for node, those in by_node.items()}
    opened, found = gather_each(agents, CHECK, open_at, listening, OPEN_S)
    try:
        targets = [
            (choice, Target(node, choice.address, port, token))
            for node, (token, ports) in opened.items()
            for choice, port in zip(by_node[node], ports, strict=True)
        ]
        tried = {node: [one for one in targets if one[0].node != node] for node in nodes}
        of_node = {node: [target for _, target in those] for node, those in tried.items()}
        problems, silent = reach_all(agents, CHECK, of_node)
    finally:
        closing = {node: (token,) for node, (token, _) in opened.items()}
        agents.call_each(close_ports, closing, OPEN_S)
    attempts = [
        Attempt(node, choice, problem)
        for node, those in problems.items()
        for (choice, _), problem in zip(tried[node], those, strict=True)
    ]
    return attempts, found + silent


def _judge_unusable(node: str, view: NodeView, name: str) -> Finding:
    outward = next(iter(view.outward), "eth0")
    prefixes = ", or use prefixes, NCCL_SOCKET_IFNAME=eth,en" if name.startswith("NCCL") else ""
    return fail(
        CHECK,
        node,
        f"{name}={view.variables[name]} names no interface of this node that leads to the others; "
        f"it has {view.describe()}",
        f"Unset {name}, or set it to an interface of every node (here: export {name}={outward}); "
        f"if names differ, set it on each node before `ray start`{prefixes}.",
    )


def _judge_attempts(
    attempts: Sequence[Attempt], views: Mapping[str, NodeView], addresses: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each unreachable choice, or for each pair if some nodes reach it."""
    order = list(views)
    by_choice: dict[Choice, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: order.index(one.choice.node)):
        by_choice[attempt.choice].append(attempt)
    found = []
    for choice, those in by_choice.items():
        broken = [attempt for attempt in those if attempt.problem]
        groups = {f"{a.source} -> {choice.node}": [a] for a in broken}
        if len(broken) == len(those):
            groups = {choice.node: broken}
        view, known_by = views[choice.node], addresses[choice.node]
        found += [_unreached(about, group, view, known_by) for about, group in groups.items()]
    found.sort(key=lambda finding: finding.verdict is not Verdict.fail)
    if len(found) > MAX_SHOWN:
        rest = f"{len(found) - MAX_SHOWN} more interfaces are not reached"
        more = replace(found[MAX_SHOWN], node="all", evidence=rest, advice="Repair those above.")
        found = [*found[:MAX_SHOWN], more]
    return found


def _unreached(about: str, attempts: Sequence[Attempt], view: NodeView, known_by: str) -> Finding:
    """Return a failure if a variable names the interface, else a warning."""
    choice = attempts[0].choice
    sources: dict[str, list[str]] = defaultdict(list)
    for attempt in attempts:
        sources[attempt.problem].append(attempt.source)
    tried = "; ".join(f"from {', '.join(nodes)}: {problem}" for problem, nodes in sources.items())
    leading = view.interface_of(known_by)
    advice = (
        "Peers get the first address of the interface: make it reachable (`ip route get "
        f"{choice.address}` there), in a container with the host's network (docker run "
        "--network=host); see network.address."
    )
    if leading not in (None, choice.interface):
        advice = (
            f"export {choice.variable}={leading}, the interface of {known_by} by which the others "
            f"know {choice.node}, or an interface in a network of all nodes; if names differ, set "
            "it on each node before `ray start`."
        )
    return (warn if choice.value is None else fail)(
        CHECK,
        about,
        f"{choice.reason}: {choice.interface} of {choice.node} is not reached at {choice.address} "
        f"{tried}; it has {view.describe()}",
        advice,
    )


def _judge_subnets(views: Mapping[str, NodeView], connections: int) -> Finding:
    each = "; ".join(f"{node}: {view.describe()}" for node, view in views.items())
    if len(views) == 1:
        (view,) = views.values()
        return ok(CHECK, "all", f"one node: {each}; NCCL would use {nccl_choice(view)}")
    subnets = {node: _subnets(view) for node, view in views.items()}
    common = set.intersection(*(set(found) for found in subnets.values()))
    sizes = [ipaddress.ip_network(net).num_addresses for found in subnets.values() for net in found]
    if not common and all(size == 1 for size in sizes):
        return ok(CHECK, "all", f"addresses without a subnet, as clouds route them: {each}")
    used: Used = {
        "NCCL": [(node, nccl_choice(view)) for node, view in views.items()],
        "gloo": [(node, name) for node, view in views.items() for name in gloo_names(view)],
    }
    astray: Used = {
        library: [
            (node, name)
            for node, name in those
            if name is None or not common & set(_subnets(views[node], name))
        ]
        for library, those in used.items()
    }
    subnet = min(common, default="")
    names = sorted({found[subnet] for found in subnets.values()}) if common else [""]
    rules: list[Rule] = [
        (
            warns_if(not common),
            "no subnet has all nodes; traffic between them passes routers, which may be slow or "
            f"drop packets. {each}",
            "See network.bandwidth for the speed of the routes. If the nodes share another "
            "network, bring its interfaces up and export NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME with their name (`ip -br addr` lists them).",
        ),
        (
            warns_if(_hosts(views) > 1 and any(astray.values())),
            f"{_list(astray, 'would use')}, outside of {subnet}, which has all nodes. {each}",
            f"export NCCL_SOCKET_IFNAME={','.join(names)} GLOO_SOCKET_IFNAME={names[0]} for the "
            "run.",
        ),
    ]
    tried = f"; {connections} connections to interfaces of their own" if connections else ""
    passed = f"all nodes are in {', '.join(sorted(common))}; {_list(used, 'uses')}{tried}"
    return first(CHECK, "all", rules, passed)


def _list(used: Used, verb: str) -> str:
    """Format 'NCCL uses a eth0, b eth0; gloo uses a eth1'."""
    return "; ".join(
        f"{library} {verb} {', '.join(f'{node} {name}' for node, name in those)}"
        for library, those in used.items()
        if those
    )


def _subnets(view: NodeView, only: str | None = None) -> dict[str, str]:
    """Return interfaces by subnet, without loopback and bridges of containers."""
    return {
        str(ipaddress.ip_interface(text).network): name
        for name, texts in view.interfaces.items()
        if not name.startswith(LAST_CHOICES) and only in (None, name)
        for text in texts
    }
