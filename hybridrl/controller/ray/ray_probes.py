"""Node probes over Ray: one actor on each node of a cluster."""

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.controller.ray.node_probes import (
    ProbeResult,
    failed,
    node_names,
    packed,
    run_packed,
    timed_out,
)
from hybridrl.controller.ray.nodes import RayNode, ranks_that_fit, ray_nodes
from hybridrl.controller.ray.runtime import joined_cluster, worker_environment

# Threads of an actor: a function that hangs must not block later ones.
CALLS_AT_ONCE = 8


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
            self._nodes = dict(zip(self.nodes, alive, strict=True))
            self.addresses = {name: node.identity.address for name, node in self._nodes.items()}
            self._actors: dict[str, ActorHandle] = {}
            for name, node in self._nodes.items():
                self._actors[name] = _actor_on(node)
                stack.callback(ray.kill, self._actors[name])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ranks_that_fit(self, wanted: Sequence[int], *, on_gpu: bool) -> dict[str, int]:
        """Return the largest of the wanted numbers of ranks that fits on each node, or 0."""
        return ranks_that_fit(self._nodes, wanted, on_gpu=on_gpu)

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        """Implement `NodeProbes.call_each`; after a timeout, a function continues in its actor."""
        deadline = time.monotonic() + timeout_s
        references = {
            node: self._actors[node].run.remote(packed(function, values))
            for node, values in arguments.items()
        }
        return {node: _answer(ref, deadline, timeout_s) for node, ref in references.items()}


class _NodeActor:
    """Runs functions on its node."""

    def run(self, call: bytes) -> bytes:
        """Run a packed call."""
        return run_packed(call)


def _actor_on(node: RayNode) -> ActorHandle:
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE, "scheduling_strategy": where}
    return ray.remote(_NodeActor).options(**options).remote()


def _answer(reference: ObjectRef, deadline: float, timeout_s: float) -> ProbeResult:
    try:
        return pickle.loads(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
    except GetTimeoutError:
        return timed_out(timeout_s)
    except RayError as error:
        return failed(error)
