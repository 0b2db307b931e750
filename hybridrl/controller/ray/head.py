"""A first look at a Ray head, without Ray, which would try for minutes to reach one."""

import os
import socket
import time
from typing import NamedTuple

PATIENCE_S = 3.0
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

    @property
    def problem(self) -> str:
        """Why there is no Ray to be joined; empty if there may be."""
        if self.error or self.is_grpc:
            return self.error
        return f"what answers is no Ray: it says {self.said!r}"


def ray_address() -> str | None:
    """RAY_ADDRESS, the cluster to join, if any; `local` is Ray's word for none."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def head_place(address: str) -> tuple[str, int] | None:
    """Host and port of a RAY_ADDRESS; None of `auto` and the like, which Ray finds by itself."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None


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
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        stream.close()  # what answers tells nothing in plain text
        return Connection("", seconds, is_grpc=True)
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
