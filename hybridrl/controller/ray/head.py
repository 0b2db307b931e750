"""Connection test of a Ray head by a plain socket: Ray itself retries for minutes."""

import os
import socket
import time
from typing import NamedTuple

PATIENCE_S = 3.0
# Start of an HTTP/2 connection: the preface, and an empty SETTINGS frame.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# The fourth byte of a frame is its type.
SETTINGS = 4


class Connection(NamedTuple):
    """Result of a connection test: the error of a failed one, the first bytes of a stranger."""

    error: str = ""
    seconds: float = 0.0
    is_grpc: bool = False
    said: str = ""

    @property
    def problem(self) -> str:
        """Reason why no Ray can be there, else empty."""
        if self.error or self.is_grpc:
            return self.error
        return f"another server answers, not Ray: {self.said!r}"


def ray_address() -> str | None:
    """Return RAY_ADDRESS, the cluster to join; None if unset or `local`."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def head_place(address: str) -> tuple[str, int] | None:
    """Return host and port of a RAY_ADDRESS; None for `auto` and others that Ray resolves."""
    host, _, port = address.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None


def connect(host: str, port: int) -> Connection:
    """Connect to the head and test for HTTP/2, which gRPC uses."""
    start = time.perf_counter()
    try:
        stream = socket.create_connection((host.strip("[]"), port), PATIENCE_S)
    except TimeoutError:
        return Connection(f"no answer within {PATIENCE_S:g} s (packets dropped or no route)")
    except ConnectionRefusedError:
        return Connection("connection refused: no process listens on the port")
    except OSError as error:
        return Connection((error.strerror or str(error)).lower())
    except UnicodeError:
        return Connection("no host has this name")
    seconds = time.perf_counter() - start
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        stream.close()  # a TLS server sends nothing in plain text
        return Connection("", seconds, is_grpc=True)
    with stream:
        try:
            stream.sendall(GREETING)
            said = stream.recv(64)
        except OSError:
            said = b""
    is_grpc = len(said) >= 9 and said[3] == SETTINGS
    return Connection("", seconds, is_grpc, "" if is_grpc else said.decode(errors="replace"))
