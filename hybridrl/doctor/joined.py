"""Nodes of `doctor --join`, before there is a Ray.

The same command runs on every node. The node with the address HEAD listens; the others connect and
run the probes that it names. JSON goes both ways; the hints of a probe give the types back.
A probe may do what its process may, so both ends prove the same key first, by the challenges of
`multiprocessing.connection`.
"""

import ipaddress
import json
import os
import pkgutil
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Lock, Thread
from typing import Any, get_type_hints

import pydantic_core
from pydantic import TypeAdapter

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    NodeProbes,
    ProbeResult,
    node_names,
    run_probe,
    timed_out,
)
from hybridrl.doctor.stages import ProbeGroup

KEY, RAY_KEY = "HYBRIDRL_DOCTOR_KEY", "RAY_AUTH_TOKEN"
SAME_KEY = f"set {KEY} to the same word on all nodes"
# Seconds to connect, for each message of the handshake, and between two attempts.
ATTEMPT_S, SILENT_S, RETRY_S = 3.0, 1, 0.3
# The kernel closes a connection after 4 x 5 seconds without a reply.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
HUNG_UP = ProbeResult(error="hung up: its process has ended or the network is gone")


@contextmanager
def joined_probes(address: str, nodes: int, timeout_s: float) -> Iterator[NodeProbes]:
    """Wait on the head until all nodes, this one included, have joined at HEAD:PORT; yield them.

    Raises:
        ConfigError: a node is missing, the port is in use, or there is no key.
    """
    host, own = parse_place(address)[0], resolved(address)
    if nodes > 1 and own != host != "localhost" and ipaddress.ip_address(own).is_loopback:
        raise ConfigError(
            f"--join {address}: on this node the name resolves to {own}, unreachable for others.\n"
            "Give an IP address of the node."
        )
    others = _join(address, own, nodes, timeout_s) if nodes > 1 else []
    connection, end = Pipe()
    Thread(target=_run_calls, args=(end,), daemon=True).start()
    everyone = [(NodeIdentity(socket.gethostname(), own, f"pid {os.getpid()}"), connection)]
    everyone += others
    names = node_names([identity for identity, _ in everyone])
    connections = {name: one for name, (_, one) in zip(names, everyone, strict=True)}
    addresses = {name: node.address for name, (node, _) in zip(names, everyone, strict=True)}
    numbers = count()

    def call_each(
        function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], timeout_s: float
    ) -> dict[str, ProbeResult]:
        deadline, number = time.monotonic() + timeout_s, next(numbers)
        name = f"{function.__module__}:{function.__qualname__}"

        def ask(node: str) -> ProbeResult:
            one = connections[node]
            try:
                _send(one, [number, name, arguments[node]])
                while one.poll(max(0.0, deadline - time.monotonic())):
                    answered, value, error = _receive(one)
                    if answered == number:  # else late, for a call that has timed out
                        kind = get_type_hints(function).get("return", Any)
                        return ProbeResult(None if error else _typed(kind, value), error)
            except (EOFError, OSError):
                return HUNG_UP
            return timed_out(timeout_s)

        with ThreadPoolExecutor(max(1, len(arguments))) as threads:
            return dict(zip(arguments, threads.map(ask, arguments), strict=True))

    try:
        yield ProbeGroup(names, addresses, call_each)
    finally:
        _end(connections.values())


def serve(address: str, timeout_s: float) -> None:
    """Connect to the head at HEAD:PORT within the timeout, and run its probes until it ends.

    Raises:
        ConfigError: the head cannot be reached, has another key, or disconnects early; or there
            is no key.
    """
    with _connect(address, timeout_s) as connection:
        _send(connection, [socket.gethostname(), os.getpid()])
        try:
            _run_calls(connection)
        except (EOFError, OSError) as error:
            raise ConfigError(f"the head at {address} hung up: read its output.") from error


def _run_calls(connection: Connection) -> None:
    """Run the numbered calls of the head until its end (None), each in a thread."""
    lock = Lock()

    def run(number: int, name: str, arguments: list[Any]) -> None:
        result = run_probe(_call, name, arguments)
        with lock, suppress(OSError):  # the head may have ended
            _send(connection, [number, result.value, result.error])

    while (message := _receive(connection)) is not None:
        Thread(target=run, args=message, daemon=True).start()


def _call(name: str, arguments: list[Any]) -> object:
    """Call a function by its name; return its value as plain data, which JSON keeps."""
    function = pkgutil.resolve_name(name)
    hints = [kind for key, kind in get_type_hints(function).items() if key != "return"]
    kinds = hints or [Any] * len(arguments)
    typed = [_typed(kind, value) for kind, value in zip(kinds, arguments, strict=False)]
    return pydantic_core.to_jsonable_python(function(*typed))


def _typed(kind: Any, value: object) -> Any:
    """Make what was sent into the type of a function's hint; plain data without one."""
    return TypeAdapter(kind).validate_python(value)


def _end(connections: Iterable[Connection]) -> None:
    for one in connections:
        with suppress(OSError):
            _send(one, None)


def _send(connection: Connection, message: list[Any] | None) -> None:
    connection.send_bytes(pydantic_core.to_json(message))


def _receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


def _join(
    address: str, own: str, nodes: int, timeout_s: float
) -> list[tuple[NodeIdentity, Connection]]:
    """Listen until all other nodes have called."""
    key, port = _key(address), parse_place(address)[1]
    try:
        listener = socket.create_server((own, port), family=_family(own), backlog=nodes)
    except OSError as error:
        raise ConfigError(
            f"--join {address}: cannot listen there: {error.strerror} "
            f"(`ss -ltnp sport = :{port}`).\nGive all nodes another port."
        ) from error
    deadline = time.monotonic() + timeout_s
    joined: list[tuple[NodeIdentity, Connection]] = []
    refused: set[str] = set()
    with listener, suppress(TimeoutError):
        while len(joined) < nodes - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            stream, (host, *_) = listener.accept()
            try:
                # First: the head answers none who has not proved the key.
                connection = _authenticated(stream, key, (deliver_challenge, answer_challenge))
                name, pid = _receive(connection)
                joined.append((NodeIdentity(name, host, f"pid {pid}"), connection))
            except AuthenticationError:
                refused.add(f"\nRefused: {host} has another key ({SAME_KEY}).")
            except (EOFError, OSError, AssertionError, ValueError):
                refused.add(f"\nRefused: {host} connected, but is no node of the doctor.")
    if len(joined) < nodes - 1:
        _end(connection for _, connection in joined)
        known = [f"{own} ({socket.gethostname()})"]
        known += [f"{node.address} ({node.host})" for node, _ in joined]
        raise ConfigError(
            f"{len(known)} of {nodes} nodes called in within {timeout_s:g} s: {', '.join(known)}."
            f"{''.join(sorted(refused))}\nStart the same command on each of the others, with "
            f"--join {address} --nodes {nodes}."
        )
    return sorted(joined, key=lambda caller: caller[0])


def _connect(address: str, timeout_s: float) -> Connection:
    """Connect to the head, with retries until the timeout."""
    place, key = parse_place(address), _key(address)
    deadline = time.monotonic() + timeout_s
    why = "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            stream = socket.create_connection(place, min(ATTEMPT_S, left))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            why = "the program that answers is not a doctor that waits for nodes"
            with suppress(EOFError, OSError, AssertionError):
                try:
                    return _authenticated(stream, key, (answer_challenge, deliver_challenge))
                except AuthenticationError as error:
                    other_key = f"the head at {address} has another key: {SAME_KEY}."
                    raise ConfigError(other_key) from error
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"this node cannot reach the head at {address} within {timeout_s:g} s: {why}.\n"
        f"Start the same command on the head, or see firewall and `ip route get {place[0]}`."
    )


def _authenticated(
    stream: socket.socket, key: bytes, challenges: Iterable[Callable[[Connection, bytes], None]]
) -> Connection:
    """Return a connection whose ends have proved the key; a silent one fails."""
    stream.setblocking(True)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    with stream.dup() as same:
        connection = Connection(stream.detach())
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENT_S, 0))
        for challenge in challenges:
            challenge(connection, key)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def _key(address: str) -> bytes:
    if given := os.environ.get(KEY) or os.environ.get(RAY_KEY):
        return given.encode()
    raise ConfigError(
        f"--join {address}: {KEY} is not set. Both ends run programs that the other sends, so they "
        f"must share a key.\n`openssl rand -hex 32` prints one: export {KEY}=... on all nodes."
    )


def parse_place(text: str) -> tuple[str, int]:
    """Parse HEAD:PORT, with an IPv6 address in brackets; raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--join {text}: expected HEAD:PORT, for example 10.0.0.1:29400.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolved(address: str) -> str:
    """Return the IP address of HEAD in HEAD:PORT; raises ConfigError for an unknown name."""
    host = parse_place(address)[0]
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--join {address}: {host} is not known on this node ({error.strerror}).\n"
            "Give an IP address, or add the name to /etc/hosts."
        ) from error


def listens_here(address: str) -> bool:
    """Return True if this node has the address of HEAD:PORT."""
    own = resolved(address)
    with socket.socket(_family(own)) as probe, suppress(OSError):
        probe.bind((own, 0))
        return True
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
