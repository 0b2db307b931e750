"""Rendezvous of the ranks: a file of rank 0 if they share a node, else an address and a port.

A listening store has no authentication, so any user could join the ranks; the file is readable
by the run's user only. A free port can be taken before it is used. Therefore the store, on which
the process group is built, listens on the very socket that found the port. torch is imported inside
functions, after the number of threads is set (host.py).
"""

import errno
import ipaddress
import os
import socket
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hybridrl.config.errors import ConfigError
from hybridrl.processes.cleanup import SHARED_MEMORY

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Key of rank 0's store for its owner.
HOLDER = "hybridrl/holder"
FILE_PREFIX = "hybridrl-rendezvous-"
# Ports below are reserved for the system.
FIRST_USER_PORT = 1024


class Rendezvous(NamedTuple):
    """Address of rank 0's store, and number of ranks.

    Attributes:
        address, port: of the store; path and 0 of a file.
        world_size: number of ranks.
        holder: host and process of rank 0. It identifies the store if several runs use an
            ambiguous address, such as localhost.
    """

    address: str
    port: int
    world_size: int
    holder: str

    @property
    def is_file(self) -> bool:
        """True if the store is a file."""
        return self.port == 0


def open_store(
    address: str, ports: Sequence[int], world_size: int, timeout_s: float
) -> tuple["TCPStore", Rendezvous]:
    """Create a store that listens on this node, on the first free port of `ports`.

    With an IP address of this node, or localhost, it listens on that address only. With a name it
    listens on all addresses, because nodes often resolve their own name to 127.0.1.1.
    """
    from torch.distributed import TCPStore

    listener = listen(address, ports)
    port = listener.getsockname()[1]
    store = TCPStore(
        *(address, port, world_size),
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, _publish_owner(store, address, port, world_size)


def open_file_store(world_size: int, timeout_s: float) -> tuple["FileStore", Rendezvous]:
    """Create a store in a new file in shared memory, for ranks of this node and user.

    The caller removes the file.
    """
    from torch.distributed import FileStore

    descriptor, path = tempfile.mkstemp(prefix=FILE_PREFIX, dir=SHARED_MEMORY)  # mode 0600
    os.close(descriptor)
    store = FileStore(path)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, _publish_owner(store, path, 0, world_size)


def _publish_owner(
    store: "TCPStore | FileStore", address: str, port: int, world_size: int
) -> Rendezvous:
    holder = f"{socket.gethostname()} pid {os.getpid()}"
    store.set(HOLDER, holder)
    return Rendezvous(address, port, world_size, holder)


def port_band(first: int, last: int, ephemeral: Path = EPHEMERAL_PORTS) -> range:
    """Return the ports `first` to `last`, moved below the kernel's ephemeral range on overlap.

    Any outgoing connection may hold a port of that range. Without room below it, the band stays.
    """
    low, high = (int(number) for number in ephemeral.read_text().split())
    size = last - first + 1
    if last < low or first > high or low - size < FIRST_USER_PORT:
        return range(first, last + 1)
    return range(low - size, low)


def given_port() -> int | None:
    """Return MASTER_PORT, or None if unset; ConfigError if it is not a port."""
    text = os.environ.get("MASTER_PORT")
    if not text:
        return None
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"MASTER_PORT={text}, expected a port. Set one, or unset it.")
    return int(text)


def listen(address: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port of `ports`; ConfigError if there is none."""
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
        f"no port for the rendezvous: {which} in use on rank 0's node (see `ss -ltnp`).\n"
        "Set cluster.rendezvous_ports to others, or MASTER_PORT, which comes first, to a free one."
    )


def _listen_on(address: str, port: int) -> socket.socket:
    if address == "localhost" or is_ip(address):  # may name one interface of this node
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(place, family=family)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # else a NAT address of this node
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_ip(address: str) -> bool:
    """Return True for an IPv4 or IPv6 address, without brackets; false for names."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def join_store(where: Rendezvous, timeout_s: float) -> "TCPStore | FileStore":
    """Connect to rank 0's store within `timeout_s` seconds.

    Raises:
        RuntimeError: there is another store at the address, as of another run at localhost.
    """
    from torch.distributed import FileStore, TCPStore

    timeout = timedelta(seconds=timeout_s)
    if where.is_file:
        store: TCPStore | FileStore = FileStore(where.address)
        store.set_timeout(timeout)
    else:
        size = where.world_size
        store = TCPStore(where.address, where.port, size, is_master=False, timeout=timeout)
    holder = store.get(HOLDER).decode() if store.check([HOLDER]) else "no rank 0"
    if holder != where.holder:
        place = where.address if where.is_file else f"{where.address}:{where.port}"
        raise RuntimeError(
            f"the rendezvous {place} should be of {where.holder}, and is of {holder}.\n"
            "Set MASTER_ADDR to an address of rank 0's node that every node can reach."
        )
    return store


def environment_of(where: Rendezvous) -> dict[str, str]:
    """Return the environment variables for libraries; a file has only WORLD_SIZE."""
    variables = {"WORLD_SIZE": str(where.world_size)}
    if not where.is_file:
        variables |= {"MASTER_ADDR": where.address, "MASTER_PORT": str(where.port)}
    return variables


def interface_of(address: str) -> str | None:
    """Return the name of this node's interface with an IP address, or None (NAT)."""
    if address.startswith("127."):  # the interface lists only the first of them
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
