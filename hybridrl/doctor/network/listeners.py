"""Processes that listen on ports of this node."""

from collections.abc import Container, Iterator
from typing import Any

import psutil


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
