"""Function calls on the nodes of a cluster, and data sent to them through Ray's object store."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.data.shardable import Piece
from hybridrl.distributed.background import call_with_timeout

T = TypeVar("T")

# Seconds until a node must have answered, start of a process included.
NODE_TIMEOUT_S = 9.0
# Seconds for Ray to accept a task, which normally takes milliseconds.
SUBMIT_TIMEOUT_S = 5.0


class NodeTasks:
    """Function calls on the nodes of the cluster that this process has joined.

    Attributes:
        driver: id of the node of this process.
        submits_tasks: submit tasks to other nodes. Without the cluster's head, Ray blocks at each
            task and ends this process after a minute.
    """

    def __init__(self) -> None:
        self.driver = ray.get_runtime_context().get_node_id()
        self.submits_tasks = True

    def submit(
        self, node_id: str, function: Callable[..., Any], *arguments: Any, retries: int = 0
    ) -> ObjectRef:
        """Begin to run a function of a module on a node; retry after a death of its process.

        Raises:
            GetTimeoutError: Ray did not accept the task; later tasks are not submitted.
        """
        task = _task(function).options(
            num_cpus=0,
            max_retries=retries,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        if self.submits_tasks:
            with suppress(TimeoutError):
                return call_with_timeout(SUBMIT_TIMEOUT_S, partial(task.remote, *arguments))
            self.submits_tasks = False
        raise GetTimeoutError(f"Ray accepted no task within {SUBMIT_TIMEOUT_S:g} s")

    def run_each(
        self, function: Callable[..., T], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, T]:
        """Run a function, pickled by name, on several nodes; return what came in time, by node."""
        refs, results = {}, {}
        for node in arguments:
            if node != self.driver and ray.is_initialized():
                with suppress(RayError):
                    refs[node] = self.submit(node, function, *arguments[node])
        if self.driver in arguments:
            results[self.driver] = function(*arguments[self.driver])
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=NODE_TIMEOUT_S)
        for node, ref in refs.items():
            with suppress(RayError):  # node lost, or no answer
                results[node] = ray.get(ref, timeout=0)
        return results


@cache
def _task(function: Callable[..., Any]) -> Any:
    """Wrap a function as a Ray task, once, so that Ray uploads it once."""
    return ray.remote(function)


class ObjectStore:
    """Stores each piece in Ray's object store once, for the lifetime of the piece.

    `guarded` is the context of each call into Ray, which without a raylet would end this process.
    """

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._guarded = guarded
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def reference(self, piece: Piece) -> ObjectRef:
        """Return the reference to a piece's content; WorkerError if Ray is lost or has no room."""
        if piece not in self._stored:
            with self._guarded():
                self._stored[piece] = ray.put(piece())
        return self._stored[piece]
