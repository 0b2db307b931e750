"""Who listens on a port of this node."""

from collections.abc import Container, Iterator
from typing import Any

import psutil


def listening(ports: Container[int]) -> Iterator[Any]:
    """The sockets that listen on these ports, as psutil describes them."""
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port in ports and entry.status == psutil.CONN_LISTEN:
            yield entry


def holders_of(ports: Container[int]) -> list[str]:
    """Who listens on these ports, 'python (pid 12) holds 29500', where /proc shows that."""
    found = {entry.laddr.port: entry.pid for entry in listening(ports)}
    return [
        f"{'a process of another user or container' if pid is None else process_text(pid)} "
        f"holds {port}"
        for port, pid in sorted(found.items())
    ]


def process_text(pid: int) -> str:
    """A process by name and number, 'python (pid 12)'; one that is gone by its number."""
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
