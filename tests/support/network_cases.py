"""Invented nodes for tests of the stage network."""

from hybridrl.doctor.network.nodes import NodeView

LOOPBACK = {"lo": ["127.0.0.1/8"]}


def view(name="a", *, eth0="10.0.1.2/24", master=(), variables=None, **interfaces):
    """A node with eth0 and lo."""
    more = {key: [value] for key, value in interfaces.items()}
    found = {"eth0": [eth0]} | more | LOOPBACK
    return NodeView(name, found, list(master), variables or {})
