"""Which ports Ray takes on a node: its services', before it is up and after, and its workers'."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.cluster_view import joined_view
from hybridrl.controller.ray.head import ray_address

# What `ray start` and deploy/node.sh give to workers, and the first of node.sh's other ports.
WORKER_PORTS = (10002, 19999)
FIRST_PORT, NUM_PORTS = 6379, 8
LAST_PORT = 65535


class RayService(NamedTuple):
    """A service of the Ray that runs on a node, and its port."""

    name: str
    port: int


def service_ports(addresses: Mapping[str, str]) -> dict[str, range]:
    """The ports that deploy/ gives to Ray's services, by node; none where Ray is up or needs none.

    Args:
        addresses: of the nodes; some that share one, as tests do, cannot all have the ports.

    Raises:
        ConfigError: HYBRIDRL_RAY_PORT is no port.
    """
    several = len(addresses) > 1 and ray_address() is None
    first = _first_port() if several else 0
    return {
        node: range(first, first + NUM_PORTS)
        if several and list(addresses.values()).count(address) == 1
        else range(0)
        for node, address in addresses.items()
    }


def running_services(addresses: Mapping[str, str]) -> dict[str, list[RayService]]:
    """The services of the Ray that this process has joined to which other nodes connect, by node.

    Args:
        addresses: of the nodes; one alone needs none.
    """
    view = joined_view() if len(addresses) > 1 else None
    states = [state for state in view.nodes if state.alive] if view is not None else []
    return {
        node: [
            service
            for state in states
            if state.address == address
            for service in (
                RayService("Ray's node manager", state.node_manager_port),
                RayService("Ray's object manager", state.object_manager_port),
            )
        ]
        for node, address in addresses.items()
    }


def worker_ports(address: str) -> Sequence[int]:
    """The ports of which the Ray of this node gives one to each worker, or would; last ones first.

    Ray begins with the first. Empty where it leaves the choice to the kernel.

    Args:
        address: the node's, by which its Ray is told from others of the machine.
    """
    for process in psutil.process_iter(["name", "cmdline"]):
        command = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and f"--node_ip_address={address}" in command:
            return ports_in(command)
    return _last_first(*WORKER_PORTS)


def ports_in(command: Sequence[str]) -> Sequence[int]:
    """As `worker_ports`, of a raylet's command line."""
    options = dict(word[2:].split("=", 1) for word in command if word[:2] == "--" and "=" in word)
    if "worker_port_list" in options:
        return sorted(map(int, options["worker_port_list"].split(",")), reverse=True)
    low, high = int(options["min_worker_port"]), int(options["max_worker_port"])
    return _last_first(low, high or LAST_PORT) if low else []


def _last_first(low: int, high: int) -> range:
    return range(high, low - 1, -1)


def _first_port() -> int:
    text = os.environ.get("HYBRIDRL_RAY_PORT", str(FIRST_PORT))
    if not (text.isdecimal() and 0 < int(text) <= LAST_PORT - NUM_PORTS):
        raise ConfigError(f"HYBRIDRL_RAY_PORT={text}, expected the first of {NUM_PORTS} ports.")
    return int(text)
