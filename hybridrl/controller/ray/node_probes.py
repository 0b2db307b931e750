"""Node probes: plain functions run on all nodes, over any kind of connection.

A check has two parts: a *probe*, which runs on each node and returns plain data, and a
*judgement*, which compares the results. Probes are module-level functions, sent by reference, and
import slow modules themselves. They may keep state in their module: each node has one process
for the whole time.

    LocalProbes      this machine, in this process
    RayProbes        the nodes of the Ray cluster that RAY_ADDRESS names
    JoinedProbes     nodes that have connected to the driver, without Ray
"""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Protocol

from hybridrl.controller.background import run_in_background


@dataclass(frozen=True)
class ProbeResult:
    """Value of a probe on one node, or the reason for a missing value."""

    value: Any = None
    error: str = ""


class NodeProbes(Protocol):
    """One process on each node, which runs functions."""

    @property
    def nodes(self) -> list[str]:
        """Unique names of the nodes, the driver's first."""

    @property
    def addresses(self) -> dict[str, str]:
        """IP address of each node, as seen by the others."""

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


def packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle a call, with the function by reference."""
    return pickle.dumps((function, arguments))


def run_packed(call: bytes) -> bytes:
    """Run a pickled call; return a pickled `ProbeResult`. Raises nothing."""
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps(ProbeResult(function(*arguments)))
    except Exception as error:  # a failed probe is a finding
        return pickle.dumps(failed(error))


def failed(error: BaseException) -> ProbeResult:
    """Return the result of a function that raised."""
    return ProbeResult(error=f"{type(error).__name__}: {error}")


def in_thread(function: Callable[..., Any], *arguments: Any) -> "Future[ProbeResult]":
    """Run a function in a daemon thread."""

    def run() -> ProbeResult:
        try:
            return ProbeResult(function(*arguments))
        except Exception as error:  # as in run_packed
            return failed(error)

    return run_in_background(run, name="doctor")


def collect(
    futures: "Mapping[str, Future[ProbeResult]]", timeout_s: float
) -> dict[str, ProbeResult]:
    """Return the results within `timeout_s` seconds, and errors for the other nodes."""
    deadline = monotonic() + timeout_s
    answers = {}
    for node, future in futures.items():
        try:
            answers[node] = future.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            answers[node] = timed_out(timeout_s)
    return answers


def timed_out(timeout_s: float) -> ProbeResult:
    """Return the result of a node that did not answer in time."""
    return ProbeResult(error=f"no answer within {timeout_s:g} s")


class LocalProbes:
    """Probes of this machine alone, by the name `node`, in threads of this process."""

    def __init__(self, node: str) -> None:
        self.nodes = [node]
        self.addresses = {node: "127.0.0.1"}

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Implement `NodeProbes.call_each`; after a timeout, a function continues in its thread."""
        futures = {node: in_thread(function, *values) for node, values in arguments.items()}
        return collect(futures, timeout_s)
