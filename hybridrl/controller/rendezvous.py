"""One address and one port on which all ranks meet, chosen on rank 0's node and held open.

A port that was merely free a moment ago can be taken by the time it is used; here the socket that
found it is the one the store listens on, and the process group is built on that store. torch is
imported inside functions: the number of threads must be set before (host.py).
"""

import errno
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.config.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Below, ports are the system's.
FIRST_USER_PORT = 1024
# Ranks that may wait to be let in; they come all at once.
BACKLOG = 4096


class Rendezvous(NamedTuple):
    """Where the ranks meet, and how many they are."""

    address: str
    port: int
    world_size: int


def open_store(
    address: str, ports: Sequence[int], world_size: int
) -> tuple["TCPStore", Rendezvous]:
    """Listen on this node, on the first of these ports that is free.

    Listens on `address` alone where that is one of the node's own, else on all of them.

    Raises:
        ConfigError: none is free.
    """
    from torch.distributed import TCPStore

    listener = listen(address, ports)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, Rendezvous(address, port, world_size)


def port_band(first: int, last: int, ephemeral: Path = EPHEMERAL_PORTS) -> range:
    """The ports from `first` to `last`, or as many that the kernel gives to nobody.

    Any program's outgoing connection may hold a port of the ephemeral range. Where the range
    covers some of the band, the band moves below the range, if there is room.

    Args:
        first, last: both included.
        ephemeral: the kernel's file with the range's first and last port.
    """
    low, high = (int(number) for number in ephemeral.read_text().split())
    size = last - first + 1
    if last < low or first > high or low - size < FIRST_USER_PORT:
        return range(first, last + 1)
    return range(low - size, low)


def listen(address: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first of these ports that is free.

    Raises:
        ConfigError: none is free.
    """
    taken: list[int] = []
    for port in ports:
        try:
            return _listen_on(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
    which = f"port {taken[0]} is" if len(taken) == 1 else f"ports {taken[0]} to {taken[-1]} are"
    raise ConfigError(
        f"no port for the rendezvous: {which} in use on rank 0's node. End what holds them "
        "(`ss -ltnp`), set cluster.rendezvous_ports to others, or MASTER_PORT to a free one."
    )


def _listen_on(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:  # a name or an address that others know this node by
        own = error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror)
        if own:
            raise
    return socket.create_server(("", port), backlog=BACKLOG)


def join_store(where: Rendezvous, timeout_s: float) -> "TCPStore":
    """Connect to rank 0's store within `timeout_s` seconds."""
    from torch.distributed import TCPStore

    return TCPStore(
        where.address,
        where.port,
        where.world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )


def disagreement(expected: Rendezvous, reports: list[Rendezvous]) -> str | None:
    """Which ranks got another rendezvous than the one handed out; None when all agree."""
    others = [
        f"rank {rank} got {report.address}:{report.port} for {report.world_size} ranks"
        for rank, report in enumerate(reports)
        if report != expected
    ]
    if not others:
        return None
    return (
        f"the ranks do not agree on the rendezvous {expected.address}:{expected.port} for "
        f"{expected.world_size} ranks: {', '.join(others)}"
    )
