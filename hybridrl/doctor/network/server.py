"""Ports of a node: listening sockets during the network checks, connections to them, Ray's ports.

A connection gets a greeting with the socket's token. The sockets live in the node's process
between two calls.
"""

import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

import psutil

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.cluster_view import joined_view
from hybridrl.controller.ray.head import ray_address
from hybridrl.controller.rendezvous import EPHEMERAL_PORTS, listen
from hybridrl.doctor.network.nodes import Choice

GREETING, TOKEN_BYTES = b"hybridrl", 8
# Seconds without data until a connection counts as broken.
PATIENCE_S = 3.0
AT_ONCE = 64
# Ports of workers under `ray start` and deploy/node.sh, and the first of node.sh's other ports.
WORKER_PORTS = (10002, 19999)
FIRST_PORT, NUM_PORTS = 6379, 8
LAST_PORT = 65535
REASONS = {
    errno.ECONNREFUSED: "refused (a firewall rejects it, or the address is another machine's)",
    errno.ENETUNREACH: "no route (Network is unreachable)",
    errno.EHOSTUNREACH: "no route (No route to host)",
    errno.EINVAL: "the node's own `ip rule` or `ip route` discards what it sends there (blackhole)",
}

_OPEN: dict[str, list[socket.socket]] = {}


class Opened(NamedTuple):
    """Ports on which a node listens, with the token of its greetings.

    Attributes:
        rendezvous: None: none is free, because of `problem`.
        worker: one of Ray's workers' ports; None: none is free, or the kernel chooses.
        chosen: a port that the kernel chose, as for NCCL and gloo.
        holders, taken: processes on ports for the rendezvous and for Ray's services.
        ephemeral, worker_ports: first and last of ip_local_port_range and for Ray's workers.
        of_choices: a port for each of the addresses of interfaces that NCCL or gloo will use.
    """

    token: str
    rendezvous: int | None
    worker: int | None
    chosen: int
    problem: str
    holders: list[str]
    ephemeral: tuple[int, int]
    worker_ports: tuple[int, int] = WORKER_PORTS
    services: Sequence[int] = ()
    taken: Sequence[str] = ()
    of_choices: Sequence[int] = ()


class Target(NamedTuple):
    """A port of another node with the token of its greeting; a `service` of Ray has none.

    `choice`: the interface with this address, if NCCL or gloo will use another than Ray.
    """

    node: str
    address: str
    port: int
    token: str
    service: str = ""
    choice: Choice | None = None


def open_ports(
    address: str,
    meeting: str,
    band: Sequence[int],
    services: Sequence[int] = (),
    chosen_addresses: Sequence[str] = (),
) -> Opened:
    """Listen like the rendezvous and Ray, and on ports that the kernel chooses.

    `address` is this node's, as the others use it; `meeting` that of the rendezvous: MASTER_ADDR
    on rank 0's node. `band` has ports for the rendezvous, `services` all of Ray's services.
    """
    low, high = (int(number) for number in EPHEMERAL_PORTS.read_text().split())
    workers = worker_ports(address)
    listeners: list[socket.socket] = []

    def first_free(address: str, ports: Sequence[int]) -> tuple[int | None, str]:
        try:
            listeners.append(listen(address, ports))
        except (ConfigError, OSError) as error:
            return None, error.texts[0] if isinstance(error, ConfigError) else str(error)
        return int(listeners[-1].getsockname()[1]), ""

    worker = first_free(address, workers)[0] if workers else None
    chosen, _ = first_free(address, [0])
    assert chosen is not None
    free = [port for port in services if first_free(address, [port])[0]]
    of_choices = [first_free(own, [0])[0] or 0 for own in chosen_addresses]
    rendezvous, problem = first_free(meeting, band)
    token = secrets.token_hex(TOKEN_BYTES)
    _OPEN[token] = listeners
    for listener in listeners:
        Thread(target=_greet, args=(listener, GREETING + token.encode()), daemon=True).start()
    return Opened(
        token,
        rendezvous,
        worker,
        chosen,
        problem,
        holders_of(band) if rendezvous != band[0] else [],
        (low, high),
        (min(workers), max(workers)) if workers else (low, high),
        free,
        holders_of({*services} - {*free}),
        of_choices,
    )


def close_ports(token: str) -> None:
    """Close the listening sockets of this token."""
    for listener in _OPEN.pop(token, []):
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listener.close()


def reach(targets: list[Target], within_s: float) -> list[str]:
    """Connect to many targets at a time; return the problem of each, empty if it answered."""
    deadline = time.monotonic() + within_s
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda target: _try(target, deadline), targets))


def _try(target: Target, deadline: float) -> str:
    timeout_s = min(PATIENCE_S, deadline - time.monotonic())
    if timeout_s <= 0:
        return "not tried: no time was left"
    expected = b"" if target.service else GREETING + target.token.encode()
    try:
        with socket.create_connection((target.address, target.port), timeout_s) as stream:
            greeting = stream.recv(len(expected), socket.MSG_WAITALL) if expected else b""
    except TimeoutError:
        return f"no answer within {timeout_s:.0f} s (packets dropped: a firewall or no route)"
    except OSError as error:
        return REASONS.get(error.errno or 0, error.strerror or str(error))
    return "" if greeting == expected else f"another program answers there: {greeting[:16]!r}"


def _greet(listener: socket.socket, greeting: bytes) -> None:
    with suppress(OSError):
        while True:
            caller, _ = listener.accept()
            with caller, suppress(OSError):
                caller.sendall(greeting)


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
    view = joined_view() if len(addresses) > 1 else None
    alive = [] if view is None else [state for state in view.nodes if state.alive]
    return {
        node: [
            service
            for state in alive
            if state.address == address
            for service in (
                ("Ray's node manager", state.node_manager_port),
                ("Ray's object manager", state.object_manager_port),
            )
        ]
        for node, address in addresses.items()
    }


def worker_ports(address: str) -> Sequence[int]:
    """Return the worker ports of the Ray at this address of the node, or the default ones.

    In descending order, because Ray begins with the first. Empty if the kernel chooses them.
    """
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["name"] == "raylet" and f"--node_ip_address={address}" in words:
            options = dict(word[2:].split("=", 1) for word in words if re.match(r"--.*=", word))
            if "worker_port_list" in options:
                return sorted(map(int, options["worker_port_list"].split(",")), reverse=True)
            low, high = int(options["min_worker_port"]), int(options["max_worker_port"])
            return range(high or LAST_PORT, low - 1, -1) if low else []
    return range(WORKER_PORTS[1], WORKER_PORTS[0] - 1, -1)


def listening(ports: Container[int]) -> Iterator[Any]:
    """Yield the sockets that listen on these ports, as psutil describes them."""
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port in ports and entry.status == psutil.CONN_LISTEN:
            yield entry


def holders_of(ports: Container[int]) -> list[str]:
    """Describe the listeners on these ports, if /proc shows any: 'python (pid 12) holds 29500'."""
    pids = {entry.laddr.port: entry.pid for entry in listening(ports)}
    hidden = "a process of another user or container"
    return [
        f"{hidden if pid is None else process_text(pid)} holds {port}"
        for port, pid in sorted(pids.items())
    ]


def process_text(pid: int) -> str:
    """Describe a process: 'python (pid 12)', or 'pid 12' if it has ended."""
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
