"""A node's listening sockets while the network is examined, and what connects to them.

Who connects gets a greeting, which says whose socket it is, and may then measure:

    p   what comes is sent back, byte by byte
    r   what comes is counted until it has been enough; the count and the time are sent back

The sockets live in the node's process between two calls.
"""

import errno
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.controller.rendezvous import EPHEMERAL_PORTS, listen
from hybridrl.doctor.network.holders import holders_of
from hybridrl.doctor.network.ray import WORKER_PORTS, worker_ports

GREETING = b"hybridrl"
TOKEN_BYTES = 8
# Seconds of silence after which a connection is given up.
PATIENCE_S = 3.0
AT_ONCE = 64
CHUNK = 2**20
PINGS = 50
# Bytes received, and seconds from the first to the last of them.
RESULT = struct.Struct("!qd")

_OPEN: dict[str, list[socket.socket]] = {}


class Opened(NamedTuple):
    """Ports on which a node listens.

    Attributes:
        token: what a greeting from there must hold.
        rendezvous: the port that the ranks would meet on; None: none is free.
        worker: a port of those that Ray gives to its workers; None: all are taken, or Ray leaves
            the choice to the kernel.
        chosen: a port that the kernel chose, as it does for NCCL and gloo.
        problem: why there is none for the rendezvous.
        holders: who holds ports of the band: 'python (pid 12) holds 29500'.
        ephemeral: first and last of the ports that the kernel chooses from.
        worker_ports: first and last of those that Ray gives to its workers.
        services: ports of those that Ray's services will have.
        taken: those that they cannot have, by whom: 'redis-server (pid 12) holds 6379'.
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


class Target(NamedTuple):
    """A port of another node, whose greeting must hold `token`; a `service` of Ray's has none."""

    node: str
    address: str
    port: int
    token: str
    service: str = ""


class Speed(NamedTuple):
    """Of one stream from this node to another: seconds per round trip, bytes per second."""

    round_trip_s: float
    bytes_per_s: float


def open_ports(
    address: str, meeting: str, band: Sequence[int], services: Sequence[int] = ()
) -> Opened:
    """Listen as the rendezvous and Ray would, and on a port that the kernel chooses.

    Args:
        address: by which the others connect.
        meeting: that of the rendezvous: MASTER_ADDR on rank 0's node.
        band: ports that the rendezvous tries, in this order.
        services: ports that Ray's services will have, all of them.
    """
    low, high = (int(number) for number in EPHEMERAL_PORTS.read_text().split())
    workers = worker_ports(address)
    worker, chosen = _first_free(address, workers), listen(address, [0])
    of_services = {port: _first_free(address, [port]) for port in services}
    port, problem, meeting_place = None, "", None
    try:
        meeting_place = listen(meeting, band)
        port = _port(meeting_place)
    except (ConfigError, OSError) as error:
        problem = error.problems[0] if isinstance(error, ConfigError) else str(error)
    listeners = (worker, chosen, meeting_place, *of_services.values())
    return Opened(
        answer_on([listener for listener in listeners if listener is not None]),
        port,
        None if worker is None else _port(worker),
        _port(chosen),
        problem,
        holders_of(band) if port is None or port != band[0] else [],
        (low, high),
        (min(workers), max(workers)) if workers else (low, high),
        [number for number, listener in of_services.items() if listener is not None],
        holders_of([number for number, listener in of_services.items() if listener is None]),
    )


def answer_on(listeners: list[socket.socket]) -> str:
    """Answer who connects to these until `close_ports`; the token of the greetings."""
    token = secrets.token_hex(TOKEN_BYTES)
    _OPEN[token] = listeners
    for listener in listeners:
        Thread(target=_serve, args=(listener, token), daemon=True).start()
    return token


def _first_free(address: str, ports: Sequence[int]) -> socket.socket | None:
    """A socket that listens on the first of these ports that is free; None if none is."""
    try:
        return listen(address, ports) if ports else None
    except ConfigError:
        return None


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def close_ports(token: str) -> None:
    """Close the listening sockets of this token."""
    for listener in _OPEN.pop(token, []):
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        listener.close()


def reach(targets: list[Target], within_s: float) -> list[str]:
    """Connect to all of these, many at a time.

    Returns:
        What went wrong with each; empty where its greeting came, or where a service of Ray's
        took the connection.
    """
    deadline = time.monotonic() + within_s
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda target: _try(target, deadline), targets))


def measure(target: Target, seconds: float, max_bytes: int) -> Speed:
    """Round trip and bandwidth of a stream to another node, as the receiver counts it.

    Args:
        target: where to send to.
        seconds: how long to send, at most.
        max_bytes: how much to send, at most.

    Raises:
        OSError: the connection fails.
    """
    with _connected(target, PATIENCE_S) as stream:
        stream.sendall(b"p")
        round_trip_s = _round_trip(stream)
    with _connected(target, PATIENCE_S) as stream:
        stream.sendall(b"r" + RESULT.pack(max_bytes, seconds))
        # The kernel has taken more than has arrived; what is left in its hands is thrown away.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return Speed(round_trip_s, _stream(stream, seconds))


def _round_trip(stream: socket.socket) -> float:
    """Seconds there and back: the least of several, which no other load has disturbed."""
    times: list[float] = []
    stop = time.monotonic() + 0.1
    while len(times) < PINGS and (not times or time.monotonic() < stop):
        start = time.perf_counter()
        stream.sendall(b".")
        _receive(stream, 1)
        times.append(time.perf_counter() - start)
    return min(times)


def _stream(stream: socket.socket, seconds: float) -> float:
    chunk = memoryview(bytes(CHUNK))
    stop = time.monotonic() + seconds + PATIENCE_S
    stream.setblocking(False)
    reply = b""
    while len(reply) < RESULT.size:
        if time.monotonic() > stop:
            raise TimeoutError("the stream stalled")
        moved = False
        with suppress(BlockingIOError):
            moved = stream.send(chunk) > 0
        with suppress(BlockingIOError):
            part = stream.recv(RESULT.size - len(reply))
            if not part:
                raise ConnectionResetError("hung up in the middle of the stream")
            reply += part
            moved = True
        if not moved:
            time.sleep(0.0005)
    count, spent = RESULT.unpack(reply)
    return count / spent if spent > 0 else 0.0


def _connected(target: Target, timeout_s: float) -> socket.socket:
    """A stream to a target whose greeting has come."""
    stream = socket.create_connection((target.address, target.port), timeout_s)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = _receive(stream, len(GREETING) + 2 * TOKEN_BYTES)
        if greeting != GREETING + target.token.encode():
            raise OSError(errno.EPROTO, f"somebody else answers there: {greeting[:16]!r}")
    except BaseException:
        stream.close()
        raise
    return stream


def _try(target: Target, deadline: float) -> str:
    timeout_s = min(PATIENCE_S, deadline - time.monotonic())
    if timeout_s <= 0:
        return "not tried: no time was left"
    try:
        if target.service:
            socket.create_connection((target.address, target.port), timeout_s).close()
        else:
            _connected(target, timeout_s).close()
    except ConnectionRefusedError:
        return "refused (a firewall rejects it, or the address is another machine's)"
    except TimeoutError:
        return f"no answer within {timeout_s:.0f} s (packets dropped: a firewall or no route)"
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            return f"no route ({error.strerror})"
        if error.errno == errno.EINVAL:
            return "the node's own `ip rule` or `ip route` discards what it sends there (blackhole)"
        return error.strerror or str(error)
    return ""


def _receive(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = stream.recv(count - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "hung up without a greeting")
        data += part
    return data


def _serve(listener: socket.socket, token: str) -> None:
    with suppress(OSError):
        while True:
            caller, _ = listener.accept()
            Thread(target=_answer, args=(caller, token), daemon=True).start()


def _answer(caller: socket.socket, token: str) -> None:
    with caller, suppress(OSError):
        caller.settimeout(PATIENCE_S)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.sendall(GREETING + token.encode())
        wish = caller.recv(1)
        if wish == b"p":
            while data := caller.recv(16):
                caller.sendall(data)
        elif wish == b"r":
            max_bytes, seconds = RESULT.unpack(_receive(caller, RESULT.size))
            caller.sendall(RESULT.pack(*_count(caller, max_bytes, seconds)))
            while caller.recv(CHUNK):  # until the sender has read it and ends the stream
                continue


def _count(caller: socket.socket, max_bytes: int, seconds: float) -> tuple[int, float]:
    buffer = bytearray(CHUNK)
    count = caller.recv_into(buffer, 1)
    start = time.perf_counter()
    spent = 0.0
    while count < max_bytes and spent < seconds:
        part = caller.recv_into(buffer)
        if not part:
            break
        count += part
        spent = time.perf_counter() - start
    return count, spent
