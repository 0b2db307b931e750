"""Node probes: plain functions run on all nodes, over any kind of connection.

A check has two parts: a *probe*, which runs on each node and returns plain data, and a
*judgement*, which compares the results. Probes are module-level functions, sent by name, with
arguments and results as JSON. They import slow modules themselves, and may keep state in their
module: each node has one process for the whole time.

    LocalProbes      this machine, in this process
    RayProbes        the nodes of the Ray cluster that RAY_ADDRESS names
    joined_probes    nodes that have connected to the driver, without Ray (doctor/joined.py)
"""

import json
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

from hybridrl.distributed.background import run_in_background

# Containers that keep their type on the way.
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset)
}


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


def call_text(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Encode a call as JSON, with the function by name."""
    return json.dumps([f"{function.__module__}:{function.__qualname__}", to_json(arguments)])


def run_call(text: str) -> str:
    """Run a call; return its `ProbeResult` as JSON. Raises nothing."""
    try:
        name, arguments = json.loads(text)
        result = ProbeResult(pkgutil.resolve_name(name)(*from_json(arguments)))
        return json.dumps(to_json(result))
    except Exception as error:  # a failed probe is a finding
        return json.dumps(to_json(failed(error)))


def read_result(text: str) -> ProbeResult:
    """Decode what `run_call` returned."""
    result = from_json(json.loads(text))
    assert isinstance(result, ProbeResult)
    return result


def to_json(value: Any) -> Any:
    """Return plain data in a form that JSON keeps: what it lacks is [type, contents].

    Plain data are numbers, texts, paths, containers, enums, named tuples and dataclasses.

    Raises:
        TypeError: it is something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict:
        return ["dict", [[to_json(key), to_json(item)] for key, item in value.items()]]
    if kind in CONTAINERS.values():
        return [kind.__name__, [to_json(item) for item in value]]
    if kind is range:
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, Path):
        return ["Path", str(value)]
    if is_dataclass(value):
        contents: Any = [to_json(getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Enum):
        contents = [to_json(value.value)]
    elif isinstance(value, tuple) and kind.__module__.startswith("hybridrl."):
        contents = [to_json(item) for item in value]
    else:
        raise TypeError(f"a value of type {kind.__name__} cannot be sent between nodes")
    return [f"{kind.__module__}:{kind.__qualname__}", contents]


def from_json(data: Any) -> Any:
    """Return the value that `to_json` was given."""
    if not isinstance(data, list):
        return data
    name, contents = data
    if name == "dict":
        return {from_json(key): from_json(item) for key, item in contents}
    if name == "range":
        return range(*contents)
    if name == "Path":
        return Path(contents)
    values = [from_json(item) for item in contents]
    if name in CONTAINERS:
        return CONTAINERS[name](values)
    if not name.startswith("hybridrl."):
        raise ValueError(f"{name} is no class of hybridrl")
    return pkgutil.resolve_name(name)(*values)


def failed(error: BaseException) -> ProbeResult:
    """Return the result of a function that raised."""
    return ProbeResult(error=f"{type(error).__name__}: {error}")


def in_thread(function: Callable[..., Any], *arguments: Any) -> "Future[ProbeResult]":
    """Run a function in a daemon thread."""

    def run() -> ProbeResult:
        try:
            return ProbeResult(function(*arguments))
        except Exception as error:  # as in run_call
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
