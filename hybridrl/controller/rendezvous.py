"""Where all ranks meet: a file of rank 0's where they share a node, else an address and a port.

A store that listens asks nobody who it is, so any user of the node could join the ranks; the file
is open to the run's user alone. A port that was merely free a moment ago can be taken by the time
it is used; here the socket that found it is the one the store listens on, and the process group is
built on that store. torch is imported inside functions: the number of threads must be set before
(host.py).
"""

import errno
import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hybridrl.config.errors import ConfigError
from hybridrl.controller.processes import SHARED_MEMORY

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Under which rank 0's store keeps whose it is, and for how many ranks.
HOLDER, WORLD_SIZE = "hybridrl/holder", "hybridrl/world_size"
# By which libraries find a rendezvous.
VARIABLES = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FILE_PREFIX = "hybridrl-rendezvous-"
# Below, ports are the system's.
FIRST_USER_PORT = 1024


class Rendezvous(NamedTuple):
    """Where the ranks meet, and how many they are.

    Attributes:
        address, port: of rank 0's store; of one in a file its path, and 0.
        world_size: how many ranks there are.
        holder: rank 0's host and process: other runs may listen at an address which, like
            localhost, is another machine's on every node.
    """

    address: str
    port: int
    world_size: int
    holder: str

    @property
    def is_file(self) -> bool:
        """Whether the ranks meet in a file."""
        return self.port == 0


class Joined(NamedTuple):
    """What a rank has joined, by its own account.

    Attributes:
        store: where its connection leads, and what the store there says of itself.
        environment: what libraries read of a rendezvous, by `VARIABLES`; empty where it is unset.
    """

    store: Rendezvous
    environment: dict[str, str]


def open_store(
    address: str, ports: Sequence[int], world_size: int, timeout_s: float
) -> tuple["TCPStore", Rendezvous]:
    """Listen on this node, on the first of these ports that is free.

    Where `address` is an IP address of this node, or localhost, only connections to it are taken.
    A name listens on all addresses: nodes often know themselves by another address than others
    know them by, 127.0.1.1 for one.

    Raises:
        ConfigError: no port is free.
    """
    from torch.distributed import TCPStore

    listener = listen(address, ports)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, _introduced(store, address, port, world_size)


def open_file_store(world_size: int, timeout_s: float) -> tuple["FileStore", Rendezvous]:
    """A store in a new file in shared memory, for the ranks of this node and this user.

    Whoever ends the ranks removes it.
    """
    from torch.distributed import FileStore

    descriptor, path = tempfile.mkstemp(prefix=FILE_PREFIX, dir=SHARED_MEMORY)  # mode 0600
    os.close(descriptor)
    store = FileStore(path)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, _introduced(store, path, 0, world_size)


def _introduced(
    store: "TCPStore | FileStore", address: str, port: int, world_size: int
) -> Rendezvous:
    """Where this process's store is, which the store itself says, too."""
    holder = f"{socket.gethostname()} pid {os.getpid()}"
    store.set(HOLDER, holder)
    store.set(WORLD_SIZE, str(world_size))
    return Rendezvous(address, port, world_size, holder)


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


def given_port() -> int | None:
    """MASTER_PORT, if it is set.

    Raises:
        ConfigError: it is no port.
    """
    text = os.environ.get("MASTER_PORT")
    if text is None:
        return None
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise ConfigError(f"MASTER_PORT={text}, expected a port. Unset it to have one chosen.")
    return int(text)


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
        f"no port for the rendezvous: {which} in use on rank 0's node (`ss -ltnp` says by whom).\n"
        "Set cluster.rendezvous_ports to others, or MASTER_PORT, which comes first, to a free one."
    )


def _listen_on(address: str, port: int) -> socket.socket:
    if _is_own(address):
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(place, family=family)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # else others know this node by the address
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _is_own(address: str) -> bool:
    """Whether it may name an interface of this node, and this one alone."""
    if address == "localhost":
        return True
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def join_store(where: Rendezvous, timeout_s: float) -> "TCPStore | FileStore":
    """Connect to rank 0's store within `timeout_s` seconds."""
    from torch.distributed import FileStore, TCPStore

    if where.is_file:
        store = FileStore(where.address)
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    return TCPStore(
        where.address,
        where.port,
        where.world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
    )


def environment_of(where: Rendezvous) -> dict[str, str]:
    """The variables by which libraries find a rendezvous; in a file they cannot."""
    place = () if where.is_file else (where.address, str(where.port))
    return dict(zip(VARIABLES, (str(where.world_size), *place), strict=False))


def interface_of(address: str) -> str | None:
    """The name of this node's interface with an IP address; None where none has it (NAT)."""
    if address.startswith("127."):  # all of them, though the interface lists the first alone
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def joined(store: "TCPStore | FileStore") -> Joined:
    """What this process has joined through a store; of a store that is no rank 0's, no holder."""
    from torch.distributed import FileStore

    is_ours = store.check([HOLDER, WORLD_SIZE])
    holder = store.get(HOLDER).decode() if is_ours else ""
    world_size = int(store.get(WORLD_SIZE)) if is_ours else 0
    is_file = isinstance(store, FileStore)
    address, port = (store.path, 0) if is_file else (store.host, store.port)
    found = Rendezvous(address, port, world_size, holder)
    return Joined(found, {name: os.environ.get(name, "") for name in VARIABLES})


def disagreement(expected: Rendezvous, reports: Sequence[Joined]) -> str | None:
    """Which ranks have joined another rendezvous than rank 0's; None when all agree."""
    others = [
        f"rank {rank} has {text}"
        for rank, text in enumerate(_differences(expected, reports))
        if text
    ]
    if not others:
        return None
    return (
        f"the ranks do not agree on the rendezvous {_described(expected)}: {'; '.join(others)}.\n"
        "MASTER_ADDR must be an address of rank 0's node that leads there from every node."
    )


def _differences(expected: Rendezvous, reports: Sequence[Joined]) -> Iterator[str]:
    """What is different for each rank; empty where nothing is."""
    for report in reports:
        texts = [] if report.store == expected else [f"joined {_described(report.store)}"]
        texts += [
            f"{name}={report.environment[name]}"
            for name, value in environment_of(expected).items()
            if report.environment[name] != value
        ]
        yield ", ".join(texts)


def _described(where: Rendezvous) -> str:
    place = where.address if where.is_file else f"{where.address}:{where.port}"
    if not where.holder:
        return f"{place}, where no rank 0 listens but somebody else"
    return f"{place} of {where.holder} for {where.world_size} ranks"
