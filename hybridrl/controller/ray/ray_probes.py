"""Nodes of the cluster that this process has joined: hardware, resources, functions run on them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, NodeDiedError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.controller.node_tasks import NodeTasks
from hybridrl.controller.ray import compat
from hybridrl.controller.ray.node_probes import (
    NodeIdentity,
    ProbeResult,
    Resources,
    failed,
    node_names,
    run_probe,
    timed_out,
)
from hybridrl.controller.ray.runtime import ALL_GPUS_VISIBLE, joined_cluster, worker_environment

# Seconds for the nodes to report their hardware; on one core, a process starts slowly.
REPORT_TIMEOUT_S = 60.0
# Kinds of missing reports, as texts about nodes.
FAILED = (
    "could not report their hardware:\n{}\n"
    "Install the same hybridrl and packages there, in the Python that started Ray, or remove these "
    "nodes from the cluster."
)
REFUSED = (
    "did not report their hardware: Ray accepted no task in time: {}.\n"
    "The head may be overloaded: see `ray status`, try again, or restart Ray."
)
SILENT = (
    "did not report their hardware in time: {}.\n"
    "See `ray status`; restart Ray there, or remove these nodes from the cluster."
)
# Threads of an actor: a function that hangs must not block later ones.
CALLS_AT_ONCE = 8


class RayNode(NamedTuple):
    """Node and the resources that Ray manages; `identity` has a part of the NodeID.

    It is alive while it reports to the head.
    """

    identity: NodeIdentity
    node_id: str
    alive: bool
    cpus: float = 0.0
    gpus: float = 0.0

    @property
    def name(self) -> str:
        """Name in messages."""
        host, address, unique = self.identity
        return f"{host} ({address}, node {unique})"


def ray_nodes() -> list[RayNode]:
    """Return all nodes of the cluster, dead ones included; the driver's first."""
    driver = ray.get_runtime_context().get_node_id()
    nodes = [
        RayNode(
            NodeIdentity(
                node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"][:8]
            ),
            node["NodeID"],
            node["Alive"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
    ]
    return sorted(nodes, key=lambda node: (node.node_id != driver, node.identity))


def cluster_machine() -> Machine:
    """Return the hardware of the cluster at RAY_ADDRESS, limited to Ray's resources."""
    with joined_cluster(ALL_GPUS_VISIBLE):
        return machine_of([node for node in ray_nodes() if node.alive])


def machine_of(nodes: Sequence[RayNode]) -> Machine:
    """Return the hardware of nodes; ConfigError if one does not report it."""
    tasks, refs, reported = NodeTasks(), {}, []
    missing: dict[str, list[str]] = {FAILED: [], REFUSED: [], SILENT: []}
    for node in nodes:
        try:
            refs[node] = tasks.submit(node.node_id, local_machine, retries=3)
        except GetTimeoutError:
            missing[REFUSED].append(node.name)
    if refs:
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=REPORT_TIMEOUT_S)
    for node in nodes:
        if node not in refs:
            continue
        try:
            (hardware,) = ray.get(refs[node], timeout=0).nodes
            gpus = hardware.gpus[: int(node.gpus)]
            reported.append(replace(hardware, cores=int(node.cpus), gpus=gpus))
        except (GetTimeoutError, NodeDiedError, TaskUnschedulableError):
            missing[SILENT].append(node.name)
        except RayError as error:
            # The last line is the message of the remote exception.
            reason = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
            missing[FAILED].append(f"{node.name}: {reason}")
    problems = []
    for text, names in missing.items():
        listed = ("\n" if text is FAILED else ", ").join(names)
        begin = f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {len(names)} of {len(nodes)} nodes"
        problems += [f"{begin} {text.format(listed)}"] if names else []
    if problems:
        raise ConfigError(*problems)
    return Machine(tuple(reported))


class RayProbes:
    """One actor on each alive node of the cluster at RAY_ADDRESS; a context manager.

    Joins the cluster for the block, unless this process has joined it.

    Raises:
        ConfigError: on entering, if the cluster cannot be joined.
    """

    def __enter__(self) -> "RayProbes":
        with ExitStack() as stack:
            if not ray.is_initialized():
                stack.enter_context(joined_cluster(worker_environment(os.environ)))
            alive = [node for node in ray_nodes() if node.alive]
            self.nodes = node_names([node.identity for node in alive])
            self.addresses, self._actors = dict[str, str](), dict[str, ActorHandle]()
            self.resources, free = dict[str, Resources](), compat.free_resources()
            for name, node in zip(self.nodes, alive, strict=True):
                left = free.get(node.node_id, {})
                unused = left.get("CPU", 0.0), left.get("GPU", 0.0)
                self.addresses[name] = node.identity.address
                self.resources[name] = Resources(node.cpus, node.gpus, *unused)
                self._actors[name] = _actor_on(node)
                stack.callback(ray.kill, self._actors[name])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Implement `NodeProbes.call_each`; after a timeout, a function continues in its actor."""
        deadline = time.monotonic() + timeout_s
        references = {
            node: self._actors[node].run.remote(function, *values)
            for node, values in arguments.items()
        }
        return {node: _answer(ref, deadline, timeout_s) for node, ref in references.items()}


class _NodeActor:
    """Runs functions on its node."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> ProbeResult:
        """Run a function, pickled by name."""
        return run_probe(function, *arguments)


def _actor_on(node: RayNode) -> ActorHandle:
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": where}
    return ray.remote(_NodeActor).options(**options).remote()


def _answer(reference: ObjectRef, deadline: float, timeout_s: float) -> ProbeResult:
    try:
        result: ProbeResult = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        return result
    except GetTimeoutError:
        return timed_out(timeout_s)
    except RayError as error:
        return failed(error)
