"""Ports of Ray on a node, before and after its start, and the processes that listen on ports."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import psutil

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.cluster_view import joined_view
from hybridrl.controller.ray.head import ray_address

# Ports of workers under `ray start` and deploy/node.sh, and the first of node.sh's other ports.
WORKER_PORTS = (10002, 19999)
FIRST_PORT, NUM_PORTS = 6379, 8
LAST_PORT = 65535


def service_ports(addresses: Mapping[str, str]) -> dict[str, range]:
    """Return the ports of Ray's services under deploy/ by node; none if Ray is up or not needed.

    Raises:
        ConfigError: HYBRIDRL_RAY_PORT is no port.
    """
    if len(addresses) <= 1 or ray_address() is not None:
        return dict.fromkeys(addresses, range(0))
    text = os.environ.get("HYBRIDRL_RAY_PORT", str(FIRST_PORT))
    if not (text.isdecimal() and 0 < int(text) <= LAST_PORT - NUM_PORTS):
        raise ConfigError(f"HYBRIDRL_RAY_PORT={text}, expected the first of {NUM_PORTS} ports.")
    ports, all_addresses = range(int(text), int(text) + NUM_PORTS), list(addresses.values())
    return {
        node: ports if all_addresses.count(address) == 1 else range(0)
        for node, address in addresses.items()
    }


def running_services(addresses: Mapping[str, str]) -> dict[str, list[tuple[str, int]]]:
    """Return name and port of services of the joined Ray that other nodes connect to, by node."""
    found: dict[str, list[tuple[str, int]]] = {node: [] for node in addresses}
    view = joined_view() if len(addresses) > 1 else None
    for state in view.nodes if view is not None else ():
        for node, address in addresses.items():
            if state.alive and state.address == address:
                found[node] += [
                    ("Ray's node manager", state.node_manager_port),
                    ("Ray's object manager", state.object_manager_port),
                ]
    return found


def worker_ports(address: str) -> Sequence[int]:
    """Return the worker ports of the Ray at this address of the node, or the default ones.

    In descending order, because Ray begins with the first. Empty if the kernel chooses them.
    """
    for process in psutil.process_iter(["name", "cmdline"]):
        command = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and f"--node_ip_address={address}" in command:
            return ports_in(command)
    return _descending(*WORKER_PORTS)


def ports_in(command: Sequence[str]) -> Sequence[int]:
    """Return the worker ports in a raylet's command line, as `worker_ports`."""
    options = dict(word[2:].split("=", 1) for word in command if word[:2] == "--" and "=" in word)
    if "worker_port_list" in options:
        return sorted(map(int, options["worker_port_list"].split(",")), reverse=True)
    low, high = int(options["min_worker_port"]), int(options["max_worker_port"])
    return _descending(low, high or LAST_PORT) if low else []


def _descending(low: int, high: int) -> range:
    return range(high, low - 1, -1)


def listening(ports: Container[int]) -> Iterator[Any]:
    """Yield the sockets that listen on these ports, as psutil describes them."""
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port in ports and entry.status == psutil.CONN_LISTEN:
            yield entry


def holders_of(ports: Container[int]) -> list[str]:
    """Describe the listeners on these ports, if /proc shows any: 'python (pid 12) holds 29500'."""
    found = {entry.laddr.port: entry.pid for entry in listening(ports)}
    hidden = "a process of another user or container"
    return [
        f"{hidden if pid is None else process_text(pid)} holds {port}"
        for port, pid in sorted(found.items())
    ]


def process_text(pid: int) -> str:
    """Describe a process: 'python (pid 12)', or 'pid 12' if it has ended."""
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
