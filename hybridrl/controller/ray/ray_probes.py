"""The nodes of a Ray cluster as agents: one actor on each."""

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.controller.placement import cpus_on_nodes
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    ProbeResult,
    failed,
    late,
    node_names,
    packed,
    run_packed,
)
from hybridrl.controller.ray.runtime import joined_cluster, worker_environment

# Threads of an actor: a function that hangs must not hold up those after it.
CALLS_AT_ONCE = 8


class RayNode(NamedTuple):
    """A node as Ray's head knows it.

    Attributes:
        identity: host name, address and Ray's NodeID, shortened.
        node_id: the whole NodeID.
        alive: whether it reports to the head.
        reason: why it is not alive, as the head says.
        cpus, gpus: what Ray may hand out there.
    """

    identity: NodeIdentity
    node_id: str
    alive: bool
    reason: str
    cpus: float = 0.0
    gpus: float = 0.0


def ray_nodes() -> list[RayNode]:
    """All nodes that the cluster of this process has or had; the driver's first."""
    driver = ray.get_runtime_context().get_node_id()
    found = [
        RayNode(
            NodeIdentity(
                node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"][:8]
            ),
            node["NodeID"],
            node["Alive"],
            node["DeathReasonMessage"] or "",
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
    ]
    return sorted(found, key=lambda node: (node.node_id != driver, node.identity))


class RayProbes:
    """One actor on each node that is alive in the cluster that RAY_ADDRESS names.

    Joins the cluster for the time of the block, unless this process is in it already.

    Raises:
        ConfigError: on entering: RAY_ADDRESS does not name a cluster that can be joined.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._nodes: dict[str, RayNode] = {}
        self._actors: dict[str, ActorHandle] = {}

    def __enter__(self) -> "RayProbes":
        with ExitStack() as stack:
            if not ray.is_initialized():
                stack.enter_context(joined_cluster(worker_environment(os.environ)))
            alive = [node for node in ray_nodes() if node.alive]
            names = node_names([node.identity for node in alive])
            self._nodes = dict(zip(names, alive, strict=True))
            stack.callback(self._end)
            self._actors = {name: _actor_on(self._nodes[name]) for name in names}
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def nodes(self) -> list[str]:
        """Host names, with addresses and NodeIDs where they repeat; the driver's first."""
        return list(self._nodes)

    @property
    def addresses(self) -> dict[str, str]:
        """As Ray knows them."""
        return {name: node.identity.address for name, node in self._nodes.items()}

    def rooms(self, wanted: Sequence[int], *, on_gpu: bool) -> dict[str, int]:
        """The largest of the wanted numbers of ranks that each node can take; 0: none."""
        return rooms(self._nodes, wanted, on_gpu=on_gpu)

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """As `NodeProbes.call_each`; a function that is late goes on in its actor."""
        deadline = time.monotonic() + timeout_s
        references = {
            node: self._actors[node].run.remote(packed(function, values))
            for node, values in arguments.items()
        }
        return {
            node: _answer(reference, deadline, timeout_s) for node, reference in references.items()
        }

    def _end(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def rooms(nodes: Mapping[str, RayNode], wanted: Sequence[int], *, on_gpu: bool) -> dict[str, int]:
    """As `RayProbes.rooms`, by what a placement group would ask of these nodes."""
    cpus = cpus_on_nodes(wanted, [node.cpus for node in nodes.values()])
    asked = list(zip(wanted, cpus, strict=True))
    return {
        name: max(
            (
                slots
                for slots, share in asked
                if share <= node.cpus and (not on_gpu or slots <= node.gpus)
            ),
            default=0,
        )
        for name, node in nodes.items()
    }


class _NodeAgent:
    """Runs functions on its node."""

    def run(self, call: bytes) -> bytes:
        """As `run_packed`."""
        return run_packed(call)


def _actor_on(node: RayNode) -> ActorHandle:
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": where}
    return ray.remote(_NodeAgent).options(**options).remote()


def _answer(reference: ObjectRef, deadline: float, timeout_s: float) -> ProbeResult:
    try:
        return pickle.loads(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
    except GetTimeoutError:
        return late(timeout_s)
    except RayError as error:
        return failed(error)
