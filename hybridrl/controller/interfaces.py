"""The network interface that has an address."""

import psutil


def interface_of(address: str) -> str | None:
    """The name of this node's interface with an IP address; None where none has it (NAT)."""
    if address.startswith("127."):  # all of them, though the interface lists the first alone
        return "lo"
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None
