"""Running plain functions on the nodes of a cluster: here for the driver's, else as Ray tasks."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.controller.watch.waiting import call_with_timeout

T = TypeVar("T")

# Seconds that a node has to answer; starting a process for the task is part of it.
NODE_TIMEOUT_S = 9.0
# Seconds that Ray may take to accept a task, which is milliseconds where it works.
SUBMIT_TIMEOUT_S = 5.0


class NodeTasks:
    """The nodes of the cluster that this process has joined.

    Attributes:
        driver: id of the node of this process.
        take_tasks: whether others are asked at all. With the cluster's head gone Ray waits at
            each task, and after a minute ends this process.
    """

    def __init__(self) -> None:
        self.driver = ray.get_runtime_context().get_node_id()
        self.take_tasks = True

    def submit(
        self, node_id: str, function: Callable[..., Any], *arguments: Any, retries: int = 0
    ) -> ObjectRef:
        """Begin to run a module's function on a node, this one or another.

        Args:
            node_id: of the node.
            function: of a module, since it travels by name.
            arguments: its.
            retries: how often it is begun anew where its process dies.

        Raises:
            GetTimeoutError: Ray does not take it; nor is it asked again.
        """
        task = _task(function).options(
            num_cpus=0,
            max_retries=retries,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        if self.take_tasks:
            with suppress(TimeoutError):
                return call_with_timeout(SUBMIT_TIMEOUT_S, partial(task.remote, *arguments))
            self.take_tasks = False
        raise GetTimeoutError(f"Ray took no task within {SUBMIT_TIMEOUT_S:g} s")

    def run_each(
        self, function: Callable[..., T], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, T]:
        """What a function returns on several nodes, which run it at the same time.

        Args:
            function: of a module, since it travels by name.
            arguments: by node.

        Returns:
            By node, those that have answered.
        """
        refs, found = {}, {}
        for node in arguments:
            if node != self.driver and ray.is_initialized():
                with suppress(GetTimeoutError):
                    refs[node] = self.submit(node, function, *arguments[node])
        if self.driver in arguments:
            found[self.driver] = function(*arguments[self.driver])
        if refs:
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=NODE_TIMEOUT_S)
        for node, ref in refs.items():
            with suppress(RayError):  # gone, or without an answer
                found[node] = ray.get(ref, timeout=0)
        return found


@cache
def _task(function: Callable[..., Any]) -> Any:
    """The function as Ray's task: the head gets it once, and not with each call."""
    return ray.remote(function)
