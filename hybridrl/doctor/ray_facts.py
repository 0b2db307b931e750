"""What a node knows of Ray: its version and token, who listens on the head's port, what answers.

Without importing Ray, which takes seconds.
"""

import hashlib
import importlib.metadata
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import psutil

PATIENCE_S = 3.0
TOKEN_CHARACTERS = 8
# What an HTTP/2 client says first: the preface, and a SETTINGS frame without settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# The fourth byte of a frame is its type.
SETTINGS = 4


class Connection(NamedTuple):
    """A connection to the head.

    Attributes:
        error: why there is none; empty if there is.
        seconds: until it was there.
        is_grpc: whether what answers speaks HTTP/2.
        said: the first that came, else.
    """

    error: str = ""
    seconds: float = 0.0
    is_grpc: bool = False
    said: str = ""


class RayFacts(NamedTuple):
    """What `ray_facts` found.

    Attributes:
        version: of the installed Ray; empty without one.
        auth_mode: RAY_AUTH_MODE.
        token: the first characters of the token's SHA-256; empty without one.
        connection: to the head.
        listeners: addresses on which this node listens on the head's port.
        holders: the processes that do, 'redis-server (pid 12)'.
    """

    version: str
    auth_mode: str
    token: str
    connection: Connection
    listeners: list[str]
    holders: list[str]


def ray_facts(head: tuple[str, int] | None) -> RayFacts:
    """Look on this node; `head` is the address of RAY_ADDRESS, None without one."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    listeners, holders = _listeners(head[1]) if head is not None else ([], [])
    return RayFacts(
        version,
        os.environ.get("RAY_AUTH_MODE", ""),
        token_hash(),
        Connection() if head is None else connect(*head),
        listeners,
        holders,
    )


def token_hash() -> str:
    """A few characters that tell tokens apart and betray none, where Ray looks for its token."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        try:
            token = file.read_text().strip()
        except OSError:
            return ""
    return hashlib.sha256(token.encode()).hexdigest()[:TOKEN_CHARACTERS]


def connect(host: str, port: int) -> Connection:
    """Connect to the head and see whether it speaks HTTP/2, as gRPC does."""
    start = time.perf_counter()
    try:
        stream = socket.create_connection((host.strip("[]"), port), PATIENCE_S)
    except TimeoutError:
        return Connection(f"no answer within {PATIENCE_S:g} s (packets dropped or no route)")
    except OSError as error:
        return Connection(_reason(error))
    seconds = time.perf_counter() - start
    with stream:
        try:
            stream.sendall(GREETING)
            said = stream.recv(64)
        except OSError:
            said = b""
    is_grpc = len(said) >= 9 and said[3] == SETTINGS
    return Connection("", seconds, is_grpc, "" if is_grpc else said.decode(errors="replace"))


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nobody listens there"
    return (error.strerror or str(error)).lower()


def _listeners(port: int) -> tuple[list[str], list[str]]:
    places, holders = set(), set()
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN:
            places.add(entry.laddr.ip)
            if entry.pid is not None:
                holders.add(f"{_name(entry.pid)} (pid {entry.pid})")
    return sorted(places), sorted(holders)


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return "a process"
