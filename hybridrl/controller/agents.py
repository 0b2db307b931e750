"""Running functions on all nodes of a run, whatever connects them.

A check is made of two parts: a *probe*, a plain function that runs on each node and returns plain
data, and a *judgement*, which compares what came back. Probes are module-level functions (they are
sent by reference), import what is heavy themselves, and may leave state in their module between
two calls: the agent of a node is one process for as long as the doctor runs.

    LocalAgents      this machine, in this process
    RayAgents        the nodes of the Ray cluster that RAY_ADDRESS names
    JoinedAgents     nodes that called in by themselves, before there is a Ray
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Answer:
    """What came back from a node.

    Attributes:
        value: what the function returned.
        error: why there is no value; empty if there is one.
    """

    value: Any = None
    error: str = ""


class Agents(Protocol):
    """One process on each node that runs functions."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, unlike each other; the first is the driver's."""

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, Answer]:
        """Run a function at the same time on the nodes that have arguments.

        Args:
            function: of a module, which nodes import.
            arguments: by node.
            timeout_s: seconds until all must have answered; who has not is an error.

        Returns:
            An answer for each of these nodes, in their order.
        """


def call_all(
    agents: Agents, function: Callable[..., Any], *arguments: Any, timeout_s: float = 30.0
) -> dict[str, Answer]:
    """Run a function with the same arguments on every node."""
    return agents.call_each(function, dict.fromkeys(agents.nodes, arguments), timeout_s)


class LocalAgents:
    """This machine alone; functions run in threads of this process.

    Args:
        node: what to call it.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="doctor")

    @property
    def nodes(self) -> list[str]:
        """The one node."""
        return [self._node]

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, Answer]:
        """As `Agents.call_each`; a function that is late goes on in its thread."""
        futures = {
            node: self._threads.submit(function, *values) for node, values in arguments.items()
        }
        answers = {}
        for node, future in futures.items():
            try:
                answers[node] = Answer(future.result(timeout_s))
            except FutureTimeoutError:
                answers[node] = Answer(error=f"no answer within {timeout_s:g} s")
            except Exception as error:  # a probe's failure is a finding, not the doctor's end
                answers[node] = Answer(error=f"{type(error).__name__}: {error}")
        return answers
