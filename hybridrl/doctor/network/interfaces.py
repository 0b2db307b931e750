"""Check network.interfaces: the interfaces of NCCL and gloo, and connections to them.

Peers connect to the interface's own address, which may differ from Ray's.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.controller.rendezvous import listen
from hybridrl.doctor.context import gather_each
from hybridrl.doctor.findings import Finding, Rule, Verdict, fail, first, ok, warn, warns_if
from hybridrl.doctor.network.nodes import (
    LAST_CHOICES,
    Choice,
    NodeView,
    choices_of,
    nccl_choice,
    unusable_variables,
)
from hybridrl.doctor.network.ports import Attempt, reach_all, shortened
from hybridrl.doctor.network.server import Target, answer_on, close_ports

CHECK = "network.interfaces"
OPEN_S = 15.0
# Node and interface (None: no interface) by library.
Used = Mapping[str, Sequence[tuple[str, str | None]]]


def check(agents: NodeProbes, views: Mapping[str, NodeView]) -> list[Finding]:
    """Connect all nodes to each chosen interface with another address than the node.

    network.ports covers the address of the node in Ray.
    """
    choices: dict[str, list[Choice]] = defaultdict(list)
    for node, view in views.items() if len(views) > 1 else ():
        for choice in choices_of(node, view, between_hosts=_hosts(views) > 1):
            if choice.address != agents.addresses[node]:
                choices[node].append(choice)
    if not choices:
        return judge(views)
    listening = {node: ([c.address for c in those],) for node, those in choices.items()}
    opened, found = gather_each(agents, CHECK, open_at, listening, OPEN_S)
    try:
        targets = [
            (choice, Target(node, choice.address, port, token))
            for node, (token, ports) in opened.items()
            for choice, port in zip(choices[node], ports, strict=True)
        ]
        tried = {node: [one for one in targets if one[0].node != node] for node in views}
        attempts, silent = reach_all(agents, CHECK, tried)
    finally:
        closing = {node: (token,) for node, (token, _) in opened.items()}
        agents.call_each(close_ports, closing, OPEN_S)
    return found + silent + judge(views, attempts, agents.addresses)


def open_at(addresses: Sequence[str]) -> tuple[str, list[int]]:
    """Listen on these addresses of this node; return the token of the greetings and the ports."""
    listeners = [listen(address, [0]) for address in addresses]
    return answer_on(listeners), [int(one.getsockname()[1]) for one in listeners]


def judge(
    views: Mapping[str, NodeView],
    attempts: Sequence[Attempt[Choice]] = (),
    addresses: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Judge the interfaces of all nodes, and the attempts to connect to them."""
    found = []
    for node, view in views.items():
        for name in unusable_variables(view, between_hosts=_hosts(views) > 1):
            evidence = f"{name}={view.variables[name]} names no interface of this node that leads "
            evidence += f"to the others; it has {view.describe()}"
            outward = next(iter(view.outward), "eth0")
            advice = f"Unset {name}, or export {name}={outward} on this node before `ray start`."
            found.append(fail(CHECK, node, evidence, advice))
    found += _judge_attempts(attempts, views, addresses or {})
    return found or [_judge_subnets(views, len(attempts))]


def _hosts(views: Mapping[str, NodeView]) -> int:
    return len({view.host_name for view in views.values()})


def _judge_attempts(
    attempts: Sequence[Attempt[Choice]], views: Mapping[str, NodeView], addresses: Mapping[str, str]
) -> list[Finding]:
    """Return a finding for each unreachable choice, or for each pair if some nodes reach it."""
    by_choice: dict[Choice, list[Attempt[Choice]]] = defaultdict(list)
    for attempt in sorted(attempts, key=lambda one: [*views].index(one.target.node)):
        by_choice[attempt.target].append(attempt)
    found = []
    for choice, those in by_choice.items():
        broken = [attempt for attempt in those if attempt.problem]
        groups = {f"{a.source} -> {choice.node}": [a] for a in broken}
        if len(broken) == len(those):
            groups = {choice.node: broken}
        view, known_by = views[choice.node], addresses[choice.node]
        found += [_unreached(about, group, view, known_by) for about, group in groups.items()]
    return shortened(sorted(found, key=lambda finding: finding.verdict is not Verdict.fail))


def _unreached(
    about: str, attempts: Sequence[Attempt[Choice]], view: NodeView, known_by: str
) -> Finding:
    """Return a failure if a variable names the interface, else a warning."""
    choice = attempts[0].target
    sources: dict[str, list[str]] = defaultdict(list)
    for attempt in attempts:
        sources[attempt.problem].append(attempt.source)
    tried = "; ".join(f"from {', '.join(nodes)}: {problem}" for problem, nodes in sources.items())
    leading = view.interface_of(known_by)
    advice = (
        f"Make its first address reachable (`ip route get {choice.address}` there), in a container "
        "with docker run --network=host; see network.address."
    )
    if leading not in (None, choice.interface):
        advice = (
            f"On {choice.node}, export {choice.variable}={leading} before `ray start`: the others "
            f"know the node by its address {known_by}. Or name an interface in a network of all."
        )
    evidence = (
        f"{choice.reason}: {choice.interface} of {choice.node} is not reached at {choice.address} "
        f"{tried}; it has {view.describe()}"
    )
    return (warn if choice.value is None else fail)(CHECK, about, evidence, advice)


def _judge_subnets(views: Mapping[str, NodeView], connections: int) -> Finding:
    each = "; ".join(f"{node}: {view.describe()}" for node, view in views.items())
    if len(views) == 1:
        (view,) = views.values()
        return ok(CHECK, "all", f"one node: {each}; NCCL would use {nccl_choice(view)}")
    subnets = {node: _subnets(view) for node, view in views.items()}
    common = set.intersection(*({net for net, _ in found} for found in subnets.values()))
    every = {net for found in subnets.values() for net, _ in found}
    if not common and all(ipaddress.ip_network(net).num_addresses == 1 for net in every):
        return ok(CHECK, "all", f"addresses without a subnet, as clouds route them: {each}")
    used: Used = {
        "NCCL": [(node, nccl_choice(view)) for node, view in views.items()],
        "gloo": [(node, name) for node, view in views.items() for name in view.gloo_names],
    }
    inside = {(node, name) for node in views for net, name in subnets[node] if net in common}
    astray: Used = {
        library: [one for one in those if one not in inside] for library, those in used.items()
    }
    subnet = min(common, default="")
    names = sorted({name for f in subnets.values() for net, name in f if net == subnet}) or [""]
    rules: list[Rule] = [
        (
            warns_if(not common),
            f"no subnet has all nodes: their traffic passes routers, which may be slow. {each}",
            "See network.bandwidth for their speed. If the nodes share another network, export "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with its interface (`ip -br addr`).",
        ),
        (
            warns_if(_hosts(views) > 1 and any(astray.values())),
            f"{_list(astray, 'would use')}, outside of {subnet}, which has all nodes. {each}",
            f"export NCCL_SOCKET_IFNAME={','.join(names)} GLOO_SOCKET_IFNAME={names[0]}",
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


def _subnets(view: NodeView) -> list[tuple[str, str]]:
    """Return subnets and interfaces, without loopback and bridges of containers."""
    return [
        (str(ipaddress.ip_interface(text).network), name)
        for name, texts in view.interfaces.items()
        if not name.startswith(LAST_CHOICES)
        for text in texts
    ]
