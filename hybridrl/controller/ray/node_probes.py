"""Running functions on all nodes of a run, whatever connects them.

A check is made of two parts: a *probe*, a plain function that runs on each node and returns plain
data, and a *judgement*, which compares what came back. Probes are module-level functions (they are
sent by reference), import what is heavy themselves, and may leave state in their module between
two calls: the agent of a node is one process for as long as the doctor runs.

    LocalProbes      this machine, in this process
    RayProbes        the nodes of the Ray cluster that RAY_ADDRESS names
    JoinedProbes     nodes that called in by themselves, before there is a Ray
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
    """What came back from a node.

    Attributes:
        value: what the function returned.
        error: why there is no value; empty if there is one.
    """

    value: Any = None
    error: str = ""


class NodeProbes(Protocol):
    """One process on each node that runs functions."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, unlike each other; the first is the driver's."""

    @property
    def addresses(self) -> dict[str, str]:
        """The IP address by which the others know a node, by node."""

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Run a function at the same time on the nodes that have arguments.

        Args:
            function: of a module, which nodes import.
            arguments: by node.
            timeout_s: seconds until all must have answered; who has not is an error.

        Returns:
            An answer for each of these nodes, in their order.
        """


def call_all(
    agents: NodeProbes, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0
) -> dict[str, ProbeResult]:
    """Run a function with the same arguments on every node."""
    return agents.call_each(function, dict.fromkeys(agents.nodes, arguments), timeout_s)


class NodeIdentity(NamedTuple):
    """What a node may be called: host name, IP address, and what no other node shares."""

    host: str
    address: str
    unique: str


def node_names(identities: Sequence[NodeIdentity]) -> list[str]:
    """Names unlike each other: the host's, with the address where hosts share it, and so on."""
    names = [identity.host for identity in identities]
    for more in (lambda node: node.address, lambda node: node.unique):
        often = Counter(names)
        names = [
            f"{name} ({more(identity)})" if often[name] > 1 else name
            for name, identity in zip(names, identities, strict=True)
        ]
    assert len(set(names)) == len(names), f"nodes that cannot be told apart: {names}"
    return names


def packed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """A call as it travels to a node: the function by reference."""
    return pickle.dumps((function, arguments))


def run_packed(call: bytes) -> bytes:
    """Run a call that came as bytes; the `ProbeResult` as bytes. Raises nothing."""
    try:
        function, arguments = pickle.loads(call)
        return pickle.dumps(ProbeResult(function(*arguments)))
    except Exception as error:  # a probe's failure is a finding, not the node's end
        return pickle.dumps(failed(error))


def failed(error: BaseException) -> ProbeResult:
    """The answer of a node on which a function raised."""
    return ProbeResult(error=f"{type(error).__name__}: {error}")


def in_thread(function: Callable[..., Any], *arguments: Any) -> "Future[ProbeResult]":
    """The answer of a function that runs in a thread, which no end of a program waits for."""

    def run() -> ProbeResult:
        try:
            return ProbeResult(function(*arguments))
        except Exception as error:  # as in run_packed
            return failed(error)

    return run_in_background(run, name="doctor")


def collect(
    futures: "Mapping[str, Future[ProbeResult]]", timeout_s: float
) -> dict[str, ProbeResult]:
    """The answers that come within `timeout_s` seconds; errors in place of the others."""
    deadline = monotonic() + timeout_s
    answers = {}
    for node, future in futures.items():
        try:
            answers[node] = future.result(max(0.0, deadline - monotonic()))
        except TimeoutError:
            answers[node] = late(timeout_s)
    return answers


def late(timeout_s: float) -> ProbeResult:
    """The answer of a node that gives none in time."""
    return ProbeResult(error=f"no answer within {timeout_s:g} s")


class LocalProbes:
    """This machine alone; functions run in threads of this process.

    Args:
        node: what to call it.
    """

    def __init__(self, node: str) -> None:
        self._node = node

    @property
    def nodes(self) -> list[str]:
        """The one node."""
        return [self._node]

    @property
    def addresses(self) -> dict[str, str]:
        """The loopback address: nobody else is to reach it."""
        return {self._node: "127.0.0.1"}

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """As `NodeProbes.call_each`; a function that is late goes on in its thread."""
        return collect(
            {node: in_thread(function, *values) for node, values in arguments.items()}, timeout_s
        )
