"""Which interfaces would NCCL and gloo take on each node, and do they meet in a subnet?"""

import ipaddress
from collections.abc import Iterable, Mapping

from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.network_nodes import NodeView

CHECK = "network.interfaces"
# NCCL takes these only where there is no other; InfiniBand's own come first.
LAST_CHOICES = ("docker", "lo", "virbr")
FIRST_CHOICE = "ib"


def judge(views: Mapping[str, NodeView]) -> list[Finding]:
    """Findings from the interfaces of all nodes."""
    hosts = len({view.host_name for view in views.values()})
    named = [
        finding
        for node, view in views.items()
        for finding in _judge_named(node, view, between_hosts=hosts > 1)
    ]
    return named or [_judge_subnets(views)]


def nccl_choice(view: NodeView) -> str | None:
    """The interface that NCCL opens its sockets on, by its documented order of preference."""
    if "NCCL_SOCKET_IFNAME" in view.variables:
        allowed = matching(view.variables["NCCL_SOCKET_IFNAME"], view.interfaces)
        return next(iter(allowed), None)
    by_preference = sorted(
        view.interfaces,
        key=lambda name: (name.startswith(LAST_CHOICES), not name.startswith(FIRST_CHOICE)),
    )
    return next(iter(by_preference), None)


def matching(spec: str, names: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME allows: prefixes, after = whole names, after ^ none.

    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.
    """
    exclude = spec.startswith("^")
    spec = spec.removeprefix("^")
    exact = spec.startswith("=")
    wanted = spec.removeprefix("=").split(",")

    def hit(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return [name for name in names if hit(name) != exclude]


def _judge_named(node: str, view: NodeView, *, between_hosts: bool) -> list[Finding]:
    usable = view.outward if between_hosts else view.interfaces
    findings = []
    nccl = view.variables.get("NCCL_SOCKET_IFNAME")
    if nccl is not None and not matching(nccl, usable):
        findings.append(_unusable(node, view, f"NCCL_SOCKET_IFNAME={nccl}"))
    gloo = view.variables.get("GLOO_SOCKET_IFNAME")
    if gloo is not None and not set(gloo.split(",")) <= set(usable):
        findings.append(_unusable(node, view, f"GLOO_SOCKET_IFNAME={gloo}"))
    return findings


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


def _judge_subnets(views: Mapping[str, NodeView]) -> Finding:
    taken = {node: nccl_choice(view) for node, view in views.items()}
    each = "; ".join(f"{node}: {view.describe()}" for node, view in views.items())
    if len(views) == 1:
        (name,) = taken.values()
        return ok(CHECK, "all", f"one node: {each}; NCCL would take {name}")
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
    astray = [
        f"{node} {name}"
        for node, name in taken.items()
        if name is None or not common & set(_subnets(views[node], name))
    ]
    if astray:
        subnet = sorted(common)[0]
        names = sorted({_subnets(view)[subnet] for view in views.values()})
        return warn(
            CHECK,
            "all",
            f"NCCL would take {', '.join(astray)}, outside of {subnet}, which has all nodes. "
            f"{each}",
            f"export NCCL_SOCKET_IFNAME={','.join(names)} GLOO_SOCKET_IFNAME={names[0]} where the "
            "run is started.",
        )
    chosen = ", ".join(f"{node} {name}" for node, name in taken.items())
    return ok(CHECK, "all", f"all nodes are in {', '.join(sorted(common))}; NCCL takes {chosen}")


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
