"""Where the processes of a run listen."""

import ipaddress
from collections.abc import Iterable

import psutil


def listening(pids: Iterable[int]) -> list[tuple[str, int, str]]:
    """Address, port and command line of every TCP or UDP socket that waits for others."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())[:80]
            connections = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        for connection in connections:
            waits = connection.status == psutil.CONN_LISTEN or not connection.raddr
            if waits and connection.laddr and connection.status != psutil.CONN_CLOSE:
                found.append((connection.laddr.ip, connection.laddr.port, command))
    return found


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
