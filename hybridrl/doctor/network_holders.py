"""Who listens on a port of this node."""

from collections.abc import Container

import psutil


def holders_of(ports: Container[int]) -> list[str]:
    """Who listens on these ports, 'python (pid 12) holds 29500', where /proc shows that."""
    found = {}
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port in ports and entry.status == psutil.CONN_LISTEN:
            found[entry.laddr.port] = entry.pid
    return [f"{_process(pid)} holds {port}" for port, pid in sorted(found.items())]


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user or container"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.NoSuchProcess:
        return f"pid {pid}"
