"""Connections between the head of `doctor --join` and the other nodes: address, key, retries."""

import ipaddress
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.models.cache import cache_folder

KEY = "HYBRIDRL_DOCTOR_KEY"
RAY_KEY = "RAY_AUTH_TOKEN"
# In the user's cache: the key of connections within a machine, if no variable is set.
LOOPBACK_KEY_FILE = "doctor.key"
# Seconds for an attempt to connect, and for both challenges.
ATTEMPT_S = 3.0
RETRY_S = 0.3
# The kernel closes a connection after 4 x 5 seconds without a reply.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Place(NamedTuple):
    """Host and port of the head."""

    host: str
    port: int


def parse_place(text: str) -> Place:
    """Parse HEAD:PORT, with an IPv6 address in brackets.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--join {text}: expected HEAD:PORT, for example 10.0.0.1:29400.")
    return Place(host.removeprefix("[").removesuffix("]"), int(port))


def admit(caller: socket.socket, key: bytes) -> tuple[Connection, Any]:
    """Authenticate an accepted connection; return it with its first message.

    Raises:
        AuthenticationError: the caller has another key.
        EOFError, OSError, AssertionError: the caller is no node.
    """
    connection = _connection(caller, ATTEMPT_S)
    with _closed_on_error(connection):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        greeting = connection.recv()
        _set_timeout(connection, 0.0)
    return connection, greeting


def connect(address: str, timeout_s: float) -> Connection:
    """Connect a node to the head, with retries until the timeout.

    Raises:
        ConfigError: the head is not reached or has another key, or there is no key for a head on
            another machine.
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
            why = "the program that answers is not a doctor that waits for nodes"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise ConfigError(
        f"this node cannot reach the head at {address} within {timeout_s:g} s: {why}.\n"
        "Start the same command on the head. Refused: it does not listen yet, or on another port; "
        f"timed out or no route: a firewall or a wrong address (`ip route get {place.host}`)."
    )


def _attempt(place: Place, key: bytes, timeout_s: float) -> Connection:
    stream = socket.create_connection(place, timeout_s)
    stream.setblocking(True)
    connection = _connection(stream, timeout_s)
    with _closed_on_error(connection):
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        _set_timeout(connection, 0.0)
    return connection


@contextmanager
def _closed_on_error(connection: Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _connection(stream: socket.socket, timeout_s: float) -> Connection:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(stream.detach())
    _set_timeout(connection, timeout_s)
    return connection


def _set_timeout(connection: Connection, seconds: float) -> None:
    """Set the timeout of reads; 0: none."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def key_for(address: str) -> bytes:
    """Return the key: HYBRIDRL_DOCTOR_KEY, else Ray's token, else on loopback the user's file.

    Raises:
        ConfigError: neither is set, and other machines reach HEAD:PORT.
    """
    given = os.environ.get(KEY) or os.environ.get(RAY_KEY)
    if given:
        return given.encode()
    advice = f"`openssl rand -hex 32` prints a secret: export {KEY}=... on all nodes."
    if not ipaddress.ip_address(resolved(address)).is_loopback:
        raise ConfigError(
            f"--join {address}: {KEY} is not set. Both ends run programs that the other sends, so "
            f"they must share a key.\n{advice}"
        )
    try:
        return _loopback_key()
    except OSError as error:
        raise ConfigError(f"--join {address}: no key file ({error}).\n{advice}") from error


def _loopback_key() -> bytes:
    """Read the key file of this user, with a random key; make it if it is missing."""
    file = cache_folder() / LOOPBACK_KEY_FILE
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent) as made:  # only this user may read it
            made.write(secrets.token_hex(32).encode())
            made.flush()
            with suppress(FileExistsError):
                os.link(made.name, file)
    return file.read_bytes()


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


def hides_behind_loopback(address: str) -> bool:
    """Return True if HEAD is a name with a loopback address in /etc/hosts."""
    host, own = parse_place(address).host, resolved(address)
    return own != host != "localhost" and ipaddress.ip_address(own).is_loopback


def family(address: str) -> socket.AddressFamily:
    """Return the address family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
