"""Where the processes of a run listen."""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

PROTOCOLS = ("tcp", "tcp6", "udp", "udp6")


class Listener(NamedTuple):
    """A TCP or UDP socket that waits for others.

    Attributes:
        address, port: where.
        pid, command: of the process; the whole command line.
        inode: by which the kernel knows the socket, whichever processes have it.
    """

    address: str
    port: int
    pid: int
    command: str
    inode: str


def listening(pids: Iterable[int]) -> list[Listener]:
    """Every socket of these processes that waits for others."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            for connection in process.net_connections(kind="inet"):
                waits = connection.status == psutil.CONN_LISTEN or not connection.raddr
                if waits and connection.laddr and connection.status != psutil.CONN_CLOSE:
                    link = os.readlink(f"/proc/{pid}/fd/{connection.fd}")  # socket:[<inode>]
                    inode = link.removeprefix("socket:[").removesuffix("]")
                    found.append(Listener(*connection.laddr, pid, command, inode))
        except (psutil.Error, FileNotFoundError):  # gone meanwhile
            continue
    return found


def still_open(listeners: Iterable[Listener]) -> list[Listener]:
    """Those of some sockets that any process has yet; others may listen on such a port again."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in PROTOCOLS]
    inodes = {line.split()[9] for table in tables for line in table}
    return [listener for listener in listeners if listener.inode in inodes]


def assert_this_machine_alone_reaches(listeners: Iterable[Listener]) -> None:
    """All listen on loopback, and a process of Ray's dashboard, which there always is, nowhere."""
    assert [place for place in listeners if not is_loopback(place.address)] == []
    assert [place for place in listeners if "dashboard.py" in place.command] == []


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
