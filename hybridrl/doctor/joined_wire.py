"""The wire between the doctor's head and the nodes that call in: places, keys, connections."""

import ipaddress
import os
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError

KEY = "HYBRIDRL_DOCTOR_KEY"
RAY_KEY = "RAY_AUTH_TOKEN"
# Who connects within a machine needs none.
LOOPBACK_KEY = b"hybridrl-doctor"
# Seconds for one attempt to connect, and for both ends to prove the key.
ATTEMPT_S = 3.0
RETRY_S = 0.3
# Seconds without a sign of life after which the kernel gives up a connection: 4 x 5.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Place(NamedTuple):
    """Where the head listens."""

    host: str
    port: int


def parse_place(text: str) -> Place:
    """HEAD:PORT; an IPv6 address in brackets.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--join {text}: expected HEAD:PORT, 10.0.0.1:29400 for one.")
    return Place(host.removeprefix("[").removesuffix("]"), int(port))


def admit(caller: socket.socket, key: bytes) -> tuple[Connection, Any]:
    """The head's side: a caller's connection and the first that it says, both ends proven.

    Args:
        caller: an accepted connection.
        key: that both ends must know.

    Raises:
        AuthenticationError: it has another key.
        EOFError, OSError, AssertionError: it does not speak like a node.
    """
    _limit_waiting(caller, ATTEMPT_S)
    connection = Connection(caller.detach())
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        greeting = connection.recv()
    except BaseException:
        connection.close()
        raise
    _limit_waiting_of(connection, 0.0)
    return connection, greeting


def connect(address: str, timeout_s: float) -> Connection:
    """A node's side: the connection to the head, tried again and again until the time is over.

    Raises:
        ConfigError: the head is not reached, or has another key; or there is no key, and the head
            is another machine.
    """
    place, key = parse_place(address), key_for(address)
    deadline = time.monotonic() + timeout_s
    why = "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _attempt(place, key, min(ATTEMPT_S, left))
        except AuthenticationError as error:
            raise ConfigError(
                f"the head at {address} has another key.\nSet {KEY} to the same word on all nodes."
            ) from error
        except (EOFError, AssertionError, BlockingIOError):
            why = "somebody answers who is not a doctor that waits for nodes"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"this node cannot reach the head at {address} within {timeout_s:g} s: {why}.\n"
        "Start the same command on the head; refused: it does not listen yet or on another port; "
        "timed out or no route: a firewall or the wrong address (`ip route get "
        f"{place.host}`)."
    )


def _attempt(place: Place, key: bytes, timeout_s: float) -> Connection:
    stream = socket.create_connection(place, timeout_s)
    stream.setblocking(True)
    _limit_waiting(stream, timeout_s)
    connection = Connection(stream.detach())
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    _limit_waiting_of(connection, 0.0)
    return connection


def _limit_waiting_of(connection: Connection, seconds: float) -> None:
    duplicate = socket.socket(fileno=os.dup(connection.fileno()))
    with duplicate:
        _limit_waiting(duplicate, seconds)


def _limit_waiting(stream: socket.socket, seconds: float) -> None:
    """Let reads that wait for longer fail (0: wait for ever), and notice a dead other end."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def key_for(address: str) -> bytes:
    """What both ends must know: HYBRIDRL_DOCTOR_KEY, else Ray's token; a constant on loopback.

    Args:
        address: HEAD:PORT.

    Raises:
        ConfigError: neither is set, and other machines reach HEAD.
    """
    given = os.environ.get(KEY) or os.environ.get(RAY_KEY)
    if given:
        return given.encode()
    if ipaddress.ip_address(resolved(address)).is_loopback:
        return LOOPBACK_KEY
    raise ConfigError(
        f"--join {address}: {KEY} is not set. Both ends run programs that the other sends, so they "
        f"must prove a key.\nSet it to the same secret on all nodes: `openssl rand -hex 32` prints "
        f"one, and `export {KEY}=...` sets it."
    )


def resolved(address: str) -> str:
    """The IP address of HEAD:PORT's host, as this node knows it.

    Raises:
        ConfigError: it does not know the name.
    """
    host = parse_place(address).host
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--join {address}: {host} is not known on this node ({error.strerror}).\n"
            "Give an IP address, or add the name to /etc/hosts."
        ) from error


def hides_behind_loopback(address: str) -> bool:
    """Whether HEAD is a name that /etc/hosts of the head gives a loopback address."""
    return (
        resolved(address) != parse_place(address).host != "localhost"
        and ipaddress.ip_address(resolved(address)).is_loopback
    )


def family(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
