"""Which interfaces do NCCL and gloo listen on, by their variables and by their own preference?"""

from collections.abc import Iterable
from typing import NamedTuple

from hybridrl.doctor.network.nodes import NodeView

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
# NCCL takes these only where there is no other; InfiniBand's own come first.
LAST_CHOICES = ("docker", "lo", "virbr")
FIRST_CHOICE = "ib"


class Choice(NamedTuple):
    """An interface of a node that NCCL or gloo listens on.

    Attributes:
        node: whose it is.
        variable: what decides: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME.
        value: that of the variable; None: NCCL chooses by itself.
        interface: its name.
        address: its first, which the others are told.
    """

    node: str
    variable: str
    value: str | None
    interface: str
    address: str

    @property
    def reason(self) -> str:
        """Why it is taken: 'GLOO_SOCKET_IFNAME=eth1'."""
        if self.value is None:
            return f"NCCL takes {self.interface} by itself"
        return f"{self.variable}={self.value}"


def choices_of(node: str, view: NodeView, *, between_hosts: bool) -> list[Choice]:
    """The interfaces that NCCL and gloo listen on, but for those that cannot be right anyway."""
    nccl, gloo = view.variables.get(NCCL), view.variables.get(GLOO)
    unusable = unusable_variables(view, between_hosts=between_hosts)
    taken = [(NCCL, nccl, nccl_choice(view))]
    taken += [(GLOO, gloo, name) for name in named_for_gloo(view)]
    return [
        Choice(node, variable, value, name, view.interfaces[name][0].split("/")[0])
        for variable, value, name in taken
        if name is not None and variable not in unusable
    ]


def nccl_choice(view: NodeView) -> str | None:
    """The interface that NCCL opens its sockets on, by its documented order of preference."""
    if NCCL in view.variables:
        allowed = matching(view.variables[NCCL], view.interfaces)
        return next(iter(allowed), None)
    by_preference = sorted(
        view.interfaces,
        key=lambda name: (name.startswith(LAST_CHOICES), not name.startswith(FIRST_CHOICE)),
    )
    return next(iter(by_preference), None)


def matching(spec: str, names: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME allows: prefixes, after = whole names, after ^ none.

    Source: NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.
    """
    exclude = spec.startswith("^")
    spec = spec.removeprefix("^")
    exact = spec.startswith("=")
    wanted = spec.removeprefix("=").split(",")

    def hit(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return [name for name in names if hit(name) != exclude]


def named_for_gloo(view: NodeView) -> list[str]:
    """Those of GLOO_SOCKET_IFNAME; without it the run names the one of the node's address."""
    return view.variables[GLOO].split(",") if GLOO in view.variables else []


def unusable_variables(view: NodeView, *, between_hosts: bool) -> list[str]:
    """Those of the two variables that name no interface, or one that leads nowhere."""
    usable = view.outward if between_hosts else view.interfaces
    unusable = []
    if NCCL in view.variables and not matching(view.variables[NCCL], usable):
        unusable.append(NCCL)
    if not set(named_for_gloo(view)) <= set(usable):
        unusable.append(GLOO)
    return unusable
