"""One address and one port on which all ranks meet, chosen on rank 0's node and held open.

A port that was merely free a moment ago can be taken by the time it is used; here the store that
listens on it is the one the process group is built on. torch is imported inside functions: the
number of threads must be set before (host.py).
"""

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class Rendezvous(NamedTuple):
    """Where the ranks meet, and how many they are."""

    address: str
    port: int
    world_size: int


def open_store(address: str, port: int, world_size: int) -> tuple["TCPStore", Rendezvous]:
    """Listen on this node; port 0 takes a free one.

    Raises:
        RuntimeError: the port given is in use.
    """
    from torch.distributed import TCPStore

    store = TCPStore(address, port, world_size, is_master=True, wait_for_workers=False)
    return store, Rendezvous(address, store.port, world_size)


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
