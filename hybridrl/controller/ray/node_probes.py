"""Node probes: plain functions run on all nodes, over any kind of connection.

Probes are module-level functions that return plain data. They import slow modules themselves, and
may keep state in their module: each node has one process for the whole time.

    LocalProbes      this machine, in this process
    RayProbes        the nodes of the Ray cluster that RAY_ADDRESS names
    joined_probes    nodes that have connected to the driver, without Ray (doctor/joined.py)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from hybridrl.distributed.background import run_in_background


@dataclass(frozen=True)
class ProbeResult:
    """Value of a probe on one node, or the reason for a missing value."""

    value: Any = None
    error: str = ""


class Resources(NamedTuple):
    """CPUs and GPUs of a node that Ray manages, and those of them that no run holds."""

    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float


class NodeProbes(Protocol):
    """One process on each node, which runs functions."""

    @property
    def nodes(self) -> list[str]:
        """Unique names of the nodes, the driver's first."""

    @property
    def addresses(self) -> dict[str, str]:
        """IP address of each node, as seen by the others."""

    @property
    def resources(self) -> Mapping[str, Resources] | None:
        """Resources that Ray manages on each node; None if the nodes are not Ray's."""

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Run a function of a module on several nodes, each with its arguments, at the same time.

        Returns:
            A result for each node in `arguments`, in that order; after `timeout_s` seconds, errors.
        """


def call_all(
    agents: NodeProbes, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0
) -> dict[str, ProbeResult]:
    """Run a function with the same arguments on every node."""
    return agents.call_each(function, dict.fromkeys(agents.nodes, arguments), timeout_s)


class NodeIdentity(NamedTuple):
    """Host name, IP address and unique id of a node."""

    host: str
    address: str
    unique: str


def node_names(identities: Sequence[NodeIdentity]) -> list[str]:
    """Return unique names: host names, followed by address, then unique id, if they repeat."""
    names = [identity.host for identity in identities]
    for more in (lambda node: node.address, lambda node: node.unique):
        often = Counter(names)
        names = [
            f"{name} ({more(identity)})" if often[name] > 1 else name
            for name, identity in zip(names, identities, strict=True)
        ]
    assert len(set(names)) == len(names), f"equal names of nodes: {names}"
    return names


def run_probe(function: Callable[..., Any], *arguments: Any) -> ProbeResult:
    """Run a function; a failure is a result, too."""
    try:
        return ProbeResult(function(*arguments))
    except Exception as error:  # a failed probe is a finding
        return failed(error)


def failed(error: BaseException) -> ProbeResult:
    """Return the result of a function that raised."""
    return ProbeResult(error=f"{type(error).__name__}: {error}")


def timed_out(timeout_s: float) -> ProbeResult:
    """Return the result of a node that did not answer in time."""
    return ProbeResult(error=f"no answer within {timeout_s:g} s")


class LocalProbes:
    """Probes of this machine alone, by the name `node`, in threads of this process."""

    def __init__(self, node: str) -> None:
        self.nodes = [node]
        self.addresses = {node: "127.0.0.1"}
        self.resources = None

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Implement `NodeProbes.call_each`; after a timeout, a function continues in its thread."""
        return {n: probe_within(timeout_s, function, *values) for n, values in arguments.items()}


def probe_within(timeout_s: float, function: Callable[..., Any], *arguments: Any) -> ProbeResult:
    """Run a function in a thread for at most so many seconds."""
    call = partial(run_probe, function, *arguments)
    try:
        return run_in_background(call, name="doctor").result(timeout_s)
    except TimeoutError:
        return timed_out(timeout_s)
