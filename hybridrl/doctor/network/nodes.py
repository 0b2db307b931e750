"""Probe of a node's names, addresses and interfaces, and the rules of network.address."""

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import psutil

from hybridrl.controller.ray.node_probes import probe_within
from hybridrl.doctor.findings import Finding, Rule, fail, fails_if, first, ok, warn

ADDRESS = "network.address"
NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
# NCCL uses the former only if there is no other, and prefers the latter.
LAST_CHOICES, FIRST_CHOICE = ("docker", "lo", "virbr"), "ib"
# Seconds for a name server.
RESOLVE_S = 8.0


class NodeView(NamedTuple):
    """Names and addresses as seen on a node, of interfaces that are up as in 10.0.1.2/24.

    `master` are the addresses of MASTER_ADDR, `variables` those of NCCL and gloo that are set.
    """

    host_name: str
    interfaces: dict[str, list[str]]
    master: list[str]
    variables: dict[str, str]

    def interface_of(self, address: str) -> str | None:
        """Return the interface with an address."""
        for name, addresses in self.interfaces.items():
            if address in (text.split("/")[0] for text in addresses):
                return name
        return None

    @property
    def outward(self) -> dict[str, list[str]]:
        """Interfaces with an address that is not loopback."""
        return {
            name: addresses
            for name, addresses in self.interfaces.items()
            if not all(is_loopback(text.split("/")[0]) for text in addresses)
        }

    @property
    def gloo_names(self) -> list[str]:
        """Names in GLOO_SOCKET_IFNAME; without it the run sets it by the address."""
        return self.variables[GLOO].split(",") if GLOO in self.variables else []

    def describe(self) -> str:
        """Format the interfaces: 'eth0 10.0.1.2/24, lo 127.0.0.1/8'."""
        each = sorted(self.interfaces.items())
        return ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in each)


class Choice(NamedTuple):
    """An interface of a node for NCCL or gloo, from a variable or (value None) by default.

    `address` is empty if the variable names no interface of the node.
    """

    node: str
    variable: str
    value: str | None
    interface: str | None
    address: str


def look(master: str) -> NodeView:
    """Examine this node; `master` is MASTER_ADDR on the driver, empty if unset."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = {
        name: [
            f"{entry.address}/{_prefix(entry.netmask)}"
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
            and not entry.address.startswith("fe80:")
        ]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    return NodeView(
        socket.gethostname(),
        {name: texts for name, texts in interfaces.items() if texts},
        _resolve(master) if master else [],
        {name: os.environ[name] for name in (NCCL, GLOO) if os.environ.get(name)},
    )


def _prefix(netmask: str | None) -> int:
    return 32 if netmask is None else bin(int(ipaddress.ip_address(netmask))).count("1")


def _resolve(name: str) -> list[str]:
    """Return the addresses of a name; none if it is unknown or no name server answers in time."""
    asked = probe_within(RESOLVE_S, socket.getaddrinfo, name, None, 0, socket.SOCK_STREAM)
    entries = asked.value or []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def rank_zero_node(addresses: Mapping[str, str]) -> str:
    """Return the node of rank 0: ranks are ordered by the addresses of their nodes."""
    parsed = {node: ipaddress.ip_address(address) for node, address in addresses.items()}
    return min(parsed, key=lambda node: (parsed[node].version, parsed[node].packed))


def is_loopback(address: str) -> bool:
    """Return True for a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def choices_of(node: str, view: NodeView) -> list[Choice]:
    """Return the interfaces of NCCL and gloo."""
    used = [(NCCL, nccl_choice(view)), *((GLOO, name) for name in view.gloo_names)]
    first = {name: texts[0].split("/")[0] for name, texts in view.interfaces.items()}
    return [
        Choice(node, variable, view.variables.get(variable), name, first.get(name or "", ""))
        for variable, name in used
    ]


def nccl_choice(view: NodeView) -> str | None:
    """Return the interface of NCCL's sockets, by its documented order of preference."""
    allowed = list(view.interfaces)
    if NCCL in view.variables:
        allowed = matching(view.variables[NCCL], allowed)
    else:
        allowed.sort(key=lambda n: (n.startswith(LAST_CHOICES), not n.startswith(FIRST_CHOICE)))
    return next(iter(allowed), None)


def matching(spec: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern of NCCL allows: prefixes, = whole names, ^ excludes.

    A word without a port is compared with the name before it (mlx5_0 of mlx5_0:1).

    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
    """
    exclude, spec = spec.startswith("^"), spec.removeprefix("^")
    exact, words = spec.startswith("="), spec.removeprefix("=").split(",")

    def hit(name: str) -> bool:
        own = {word: name if ":" in word else name.partition(":")[0] for word in words}
        return any(n == word if exact else n.startswith(word) for word, n in own.items())

    return [name for name in names if hit(name) != exclude]


def judge(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> list[Finding]:
    """Judge network.address of all nodes, and MASTER_ADDR of the driver, if it is set."""
    on_one_machine = len({view.host_name for view in views.values()}) == 1
    findings = [_judge_node(n, view, addresses[n], on_one_machine) for n, view in views.items()]
    if master and views:
        findings.append(_judge_master(views, addresses, master))
    return findings


def _judge_node(node: str, view: NodeView, address: str, on_one_machine: bool) -> Finding:
    outward = [text.split("/")[0] for texts in view.outward.values() for text in texts]
    own = outward[0] if outward else "<an address that the others reach>"
    if is_loopback(address) and not on_one_machine:
        evidence = f"the others know {view.host_name} by {address}, which leads each of them to "
        evidence += f"itself; its interfaces: {view.describe()}"
        advice = f"Start Ray there with --node-ip-address={own}, or correct its /etc/hosts."
        return fail(ADDRESS, node, evidence, advice)
    if view.interface_of(address) is None and not is_loopback(address):
        evidence = f"the others know it by {address}, which none of its interfaces has: "
        advice = (
            "Others cannot reach an address behind NAT: docker run --network=host; Kubernetes: "
        )
        advice += f"hostNetwork: true; or ray start --node-ip-address={own}."
        return warn(ADDRESS, node, evidence + view.describe(), advice)
    return ok(ADDRESS, node, f"{address} on {view.host_name}")


def _judge_master(
    views: Mapping[str, NodeView], addresses: Mapping[str, str], master: str
) -> Finding:
    zero = rank_zero_node({node: addresses[node] for node in views})
    own, what = addresses[zero], f"MASTER_ADDR={master}"
    advice = f"Unset MASTER_ADDR (the run uses {own}), or export MASTER_ADDR={own} for the run."
    unknown = [node for node, view in views.items() if not view.master]
    # Rank 0's node may resolve its name to 127.0.1.1: it listens on all addresses of a name.
    seen = {n: view.master[0] for n, view in views.items() if n != zero and view.master}
    each = ", ".join(f"{address} on {node}" for node, address in seen.items())
    address = next(iter([*seen.values(), *views[zero].master]), "0.0.0.0")
    loopback = is_loopback(address)
    owners = [node for node, view in views.items() if view.interface_of(address)]
    misplaced = (
        f"{what} is {address}, which belongs to {owners[0] if owners else 'none of the nodes'}; "
        f"rank 0 is on {zero}, which has {views[zero].describe()}"
    )
    to_itself = len(views) > 1 and loopback and not is_loopback(own)
    rules: list[Rule] = [
        (fails_if(unknown), f"{what} is unknown on {', '.join(unknown)}", advice),
        (fails_if(len({*seen.values()}) > 1), f"{what} is not the same everywhere: {each}", advice),
        (fails_if(to_itself), f"{what} is {address}, which leads each node to itself", advice),
        (fails_if(zero not in owners and not loopback), misplaced, advice),
    ]
    return first(ADDRESS, "all", rules, f"{what} is {address} on all nodes, of {zero}")


def choices(views: Mapping[str, NodeView], addresses: Mapping[str, str]) -> dict[str, list[Choice]]:
    """Return the interfaces to connect to: network.ports covers the nodes' own addresses."""
    return {
        node: [
            choice
            for choice in choices_of(node, view)
            if len(views) > 1 and choice.address not in ("", addresses[node])
        ]
        for node, view in views.items()
    }
