"""How each node sees itself: names, addresses, interfaces. The probe of the checks that compare.

checks: network.address, network.interfaces
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from hybridrl.controller.ray.node_probes import collect, in_thread

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Seconds for a name server, where /etc/hosts does not know a name; the own one is for a remark.
OWN_NAME_S, MASTER_S = 0.5, 8.0


class NodeView(NamedTuple):
    """What a node says of itself.

    Attributes:
        host_name: its own.
        host_addresses: what it takes its host name for.
        interfaces: those that are up; the addresses of each, as in 10.0.1.2/24.
        master: what it takes MASTER_ADDR for; empty where that is unset or unknown there.
        variables: those of VARIABLES that are set.
    """

    host_name: str
    host_addresses: list[str]
    interfaces: dict[str, list[str]]
    master: list[str]
    variables: dict[str, str]

    def interface_of(self, address: str) -> str | None:
        """The interface that has an address."""
        for name, addresses in self.interfaces.items():
            if any(text.split("/")[0] == address for text in addresses):
                return name
        return None

    @property
    def outward(self) -> dict[str, list[str]]:
        """The interfaces with an address that other nodes may reach."""
        return {
            name: addresses
            for name, addresses in self.interfaces.items()
            if not all(is_loopback(text.split("/")[0]) for text in addresses)
        }

    def describe(self) -> str:
        """Its interfaces in one line: 'eth0 10.0.1.2/24, lo 127.0.0.1/8'."""
        return ", ".join(
            f"{name} {' '.join(addresses)}" for name, addresses in sorted(self.interfaces.items())
        )


def look(master: str) -> NodeView:
    """This node's view of itself.

    Args:
        master: MASTER_ADDR as the driver has it; empty if unset.
    """
    host_name = socket.gethostname()
    return NodeView(
        host_name,
        _resolve(host_name, OWN_NAME_S),
        _interfaces(),
        _resolve(master, MASTER_S) if master else [],
        {name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def rank_zero_node(addresses: Mapping[str, str]) -> str:
    """The node of rank 0: ranks are ordered by the nodes' addresses."""
    return min(addresses, key=lambda node: _sort_key(addresses[node]))


def is_loopback(address: str) -> bool:
    """Whether an address leads to the same machine wherever it is used."""
    return ipaddress.ip_address(address).is_loopback


def _sort_key(address: str) -> tuple[int, bytes]:
    parsed = ipaddress.ip_address(address)
    return parsed.version, parsed.packed


def _resolve(name: str, within_s: float) -> list[str]:
    """What a name stands for here; nothing if no name server answers in time."""
    answer = collect({name: in_thread(_addresses_of, name)}, within_s)[name]
    return answer.value or []


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interfaces() -> dict[str, list[str]]:
    up = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name not in up or not up[name].isup:
            continue
        texts = [
            f"{entry.address}/{_prefix(entry.netmask)}"
            for entry in addresses
            if entry.family in (socket.AF_INET, socket.AF_INET6)
            and not entry.address.startswith("fe80:")
        ]
        if texts:
            found[name] = texts
    return found


def _prefix(netmask: str | None) -> int:
    if netmask is None:
        return 32
    return bin(int(ipaddress.ip_address(netmask))).count("1")
