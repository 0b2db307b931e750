"""Nodes of `doctor --join`, before there is a Ray.

The same command runs on every node. The node with the address HEAD listens, the others connect
and run the probes that it sends. Probes are pickled, so both ends prove the same key first.
"""

import ipaddress
import os
import pickle
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from threading import Lock, Thread
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    NodeProbes,
    ProbeResult,
    node_names,
    packed,
    run_packed,
    timed_out,
)
from hybridrl.doctor.gather import ProbeGroup
from hybridrl.models.cache import cache_folder

KEY, RAY_KEY = "HYBRIDRL_DOCTOR_KEY", "RAY_AUTH_TOKEN"
# In the user's cache: the key of connections within a machine, if no variable is set.
LOOPBACK_KEY_FILE = "doctor.key"
# Seconds for an attempt to connect, and between two of them.
ATTEMPT_S, RETRY_S = 3.0, 0.3
# A node's first message, and seconds within which the head must have it.
GREETING, SILENT_S = b"hybridrl doctor", 1.0
# The kernel closes a connection after 4 x 5 seconds without a reply.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
HUNG_UP = ProbeResult(error="hung up: its process has ended or the network is gone")


class Place(NamedTuple):
    """Host and port of the head."""

    host: str
    port: int


@contextmanager
def joined_probes(address: str, nodes: int, timeout_s: float) -> Iterator[NodeProbes]:
    """Wait on the head until all nodes have joined; yield them, and end them afterwards.

    Args:
        address: HEAD:PORT.
        nodes: number of nodes, this one included.
        timeout_s: seconds until all must have joined.

    Raises:
        ConfigError: a node is missing, the port is in use, or there is no key and other machines
            reach the address.
    """
    host, own = parse_place(address).host, resolved(address)
    if nodes > 1 and own != host != "localhost" and ipaddress.ip_address(own).is_loopback:
        raise ConfigError(
            f"--join {address}: on this node the name resolves to {own}, unreachable for others.\n"
            "Give an IP address of the node in place of its name."
        )
    others = _join(address, own, nodes, timeout_s) if nodes > 1 else []
    connection, end = Pipe()
    Thread(target=_run_calls, args=(end,), daemon=True).start()
    head = NodeIdentity(socket.gethostname(), own, f"pid {os.getpid()}")
    everyone = [(head, connection), *others]
    names = node_names([identity for identity, _ in everyone])
    connections = {name: one for name, (_, one) in zip(names, everyone, strict=True)}
    addresses = {name: node.address for name, (node, _) in zip(names, everyone, strict=True)}
    numbers = count()

    def call_each(
        function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]], timeout_s: float
    ) -> dict[str, ProbeResult]:
        deadline, number = time.monotonic() + timeout_s, next(numbers)
        answers = dict.fromkeys(arguments, timed_out(timeout_s))
        for node, values in arguments.items():
            with suppress(OSError):  # reading fails, too
                connections[node].send((number, packed(function, values)))
        waiting = {connections[node]: node for node in arguments}
        while waiting and (ready := wait(list(waiting), deadline - time.monotonic())):
            for one in (one for one in ready if isinstance(one, Connection)):
                try:
                    answered, reply = one.recv()
                except (EOFError, OSError):
                    answers[waiting.pop(one)] = HUNG_UP
                else:
                    if answered == number:  # else late, for a call that has timed out
                        answers[waiting.pop(one)] = pickle.loads(reply)
        return answers

    try:
        yield ProbeGroup(names, addresses, call_each)
    finally:
        for one in connections.values():
            with suppress(OSError):
                one.send(None)


def serve(address: str, timeout_s: float) -> None:
    """Connect to the head at HEAD:PORT within the timeout, and run its probes until it ends.

    Raises:
        ConfigError: the head cannot be reached, has another key, or disconnects early; or there
            is no key for a head on another machine.
    """
    with _connect(address, timeout_s) as connection:
        connection.send((socket.gethostname(), os.getpid()))
        try:
            _run_calls(connection)
        except (EOFError, OSError) as error:
            raise ConfigError(
                f"the head at {address} hung up before its end. Read its output for the "
                "reason; more nodes may have joined than its --nodes."
            ) from error


def _run_calls(connection: Connection) -> None:
    """Run the numbered calls of the head until its end (None), each in a thread."""
    lock = Lock()

    def run(number: int, call: bytes) -> None:
        reply = run_packed(call)
        with lock, suppress(OSError):  # the head may have ended
            connection.send((number, reply))

    while (message := connection.recv()) is not None:
        Thread(target=run, args=message, daemon=True).start()


def _join(
    address: str, own: str, nodes: int, timeout_s: float
) -> list[tuple[NodeIdentity, Connection]]:
    """Listen until all other nodes have called."""
    key, port = key_for(address), parse_place(address).port
    try:
        listener = socket.create_server((own, port), family=_family(own), backlog=nodes)
    except OSError as error:
        raise ConfigError(
            f"--join {address}: cannot listen there: {error.strerror}.\n"
            f"`ss -ltnp sport = :{port}` shows who does; give all nodes another port."
        ) from error
    deadline = time.monotonic() + timeout_s
    joined: list[tuple[NodeIdentity, Connection]] = []
    refused: set[str] = set()
    with listener, suppress(TimeoutError):
        while len(joined) < nodes - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            stream, (host, *_) = listener.accept()
            try:
                joined.append(_admitted(stream, host, key))
            except AuthenticationError:
                word = f"set {KEY} to the same word on all nodes"
                refused.add(f"\nRefused: {host} has another key ({word}).")
            except (EOFError, OSError, AssertionError):
                refused.add(f"\nRefused: {host} connected, but is no node of the doctor.")
    if len(joined) < nodes - 1:
        for _, connection in joined:
            connection.send(None)
        known = [f"{own} ({socket.gethostname()})"]
        known += [f"{node.address} ({node.host})" for node, _ in joined]
        raise ConfigError(
            f"{len(known)} of {nodes} nodes called in within {timeout_s:g} s: {', '.join(known)}."
            f"{''.join(sorted(refused))}\nOn each of the others, start the same command with "
            f"--join {address} --nodes {nodes}, and read its errors."
        )
    return sorted(joined, key=lambda caller: caller[0])


def _admitted(stream: socket.socket, address: str, key: bytes) -> tuple[NodeIdentity, Connection]:
    """Return a caller that proves the key."""
    connection = _connection(stream)
    if not connection.poll(SILENT_S) or connection.recv_bytes(len(GREETING)) != GREETING:
        raise EOFError
    deliver_challenge(connection, key)  # first: the head answers none who has not proved the key
    answer_challenge(connection, key)
    host, pid = connection.recv()
    return NodeIdentity(host, address, f"pid {pid}"), connection


def _connect(address: str, timeout_s: float) -> Connection:
    """Connect to the head, with retries until the timeout."""
    place, key = parse_place(address), key_for(address)
    deadline = time.monotonic() + timeout_s
    why = "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = _connection(socket.create_connection(place, min(ATTEMPT_S, left)))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            why = "the program that answers is not a doctor that waits for nodes"
            try:
                connection.send_bytes(GREETING)
                if connection.poll(min(ATTEMPT_S, left)):
                    answer_challenge(connection, key)
                    deliver_challenge(connection, key)
                    return connection
            except AuthenticationError as error:
                raise ConfigError(
                    f"the head at {address} has another key.\n"
                    f"Set {KEY} to the same word on all nodes."
                ) from error
            except (EOFError, OSError, AssertionError):
                pass
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"this node cannot reach the head at {address} within {timeout_s:g} s: {why}.\n"
        "Start the same command on the head. Refused: it does not listen yet, or on another port; "
        f"timed out or no route: a firewall or a wrong address (`ip route get {place.host}`)."
    )


def _connection(stream: socket.socket) -> Connection:
    stream.setblocking(True)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(stream.detach())


def key_for(address: str) -> bytes:
    """Return the key: HYBRIDRL_DOCTOR_KEY, else Ray's token, else on loopback the user's file.

    Raises:
        ConfigError: neither is set, and other machines reach HEAD:PORT.
    """
    if given := os.environ.get(KEY) or os.environ.get(RAY_KEY):
        return given.encode()
    advice = f"`openssl rand -hex 32` prints a secret: export {KEY}=... on all nodes."
    if not ipaddress.ip_address(resolved(address)).is_loopback:
        raise ConfigError(
            f"--join {address}: {KEY} is not set. Both ends run programs that the other sends, so "
            f"they must share a key.\n{advice}"
        )
    file = cache_folder() / LOOPBACK_KEY_FILE
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent) as made:  # only this user reads it
                made.write(secrets.token_hex(32).encode())
                made.flush()
                with suppress(FileExistsError):
                    os.link(made.name, file)
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--join {address}: no key file ({error}).\n{advice}") from error


def parse_place(text: str) -> Place:
    """Parse HEAD:PORT, with an IPv6 address in brackets.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--join {text}: expected HEAD:PORT, for example 10.0.0.1:29400.")
    return Place(host.removeprefix("[").removesuffix("]"), int(port))


def resolved(address: str) -> str:
    """Return the IP address of HEAD in HEAD:PORT.

    Raises:
        ConfigError: this node does not know the name.
    """
    host = parse_place(address).host
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--join {address}: {host} is not known on this node ({error.strerror}).\n"
            "Give an IP address, or add the name to /etc/hosts."
        ) from error


def listens_here(address: str) -> bool:
    """Return True if this node has the address of HEAD:PORT.

    Raises:
        ConfigError: this node does not know the host.
    """
    own = resolved(address)
    with socket.socket(_family(own)) as probe:
        try:
            probe.bind((own, 0))
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
