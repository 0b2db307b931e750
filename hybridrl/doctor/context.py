"""Run and nodes under examination, the number of ranks that each may get, and calls of probes."""

import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.node_probes import NodeProbes, ProbeResult, call_all
from hybridrl.doctor.findings import Finding, fail

MACHINE_TIMEOUT_S = 60.0
RAY_AGENTS = "hybridrl.controller.ray.ray_probes"

Gathered = tuple[dict[str, Any], list[Finding]]


@dataclass(frozen=True)
class CheckContext:
    """Input of every stage.

    Attributes:
        machine: nodes that the run may use.
        shape, reward_shape: sizes of the model, and of the reward model, if there is one.
        overrides: of the command line, for the last stage.
        quick: skip every check that takes seconds.
        config_dir: folder of the user's own config groups.
        unfit: nodes with a failure in an earlier stage that the run does not need.
    """

    config: RunConfig
    machine: Machine
    shape: ModelShape
    reward_shape: ModelShape | None
    overrides: Sequence[str]
    agents: NodeProbes
    quick: bool
    config_dir: str | None = None
    unfit: frozenset[str] = frozenset()

    @property
    def on_gpu(self) -> bool:
        """Run with hardware=gpu."""
        return self.config.hardware.accelerator is Accelerator.gpu

    @cached_property
    def capacity(self) -> dict[str, int]:
        """Number of requested ranks that fit on each node: by Ray, or without Ray by its GPUs."""
        return self._capacities() | dict.fromkeys(self.unfit, 0)

    def _capacities(self) -> dict[str, int]:
        agents, wanted = self.agents, slots_on_nodes(self.config)
        if RAY_AGENTS in sys.modules:  # otherwise `agents` are not Ray's, and Ray may be missing
            from hybridrl.controller.ray.ray_probes import RayProbes

            if isinstance(agents, RayProbes):
                return agents.ranks_that_fit(wanted, on_gpu=self.on_gpu)
        if not self.on_gpu or len(set(wanted)) == 1:
            return dict.fromkeys(agents.nodes, max(wanted))
        found = {}
        for node, a in call_all(agents, local_machine, timeout_s=MACHINE_TIMEOUT_S).items():
            gpus = 0 if a.error else len(a.value.gpus)
            found[node] = max((slots for slots in wanted if slots <= gpus), default=0)
        return found

    @cached_property
    def slots(self) -> dict[str, int]:
        """Largest number of ranks that each node may get; 0: none."""
        return max_ranks(slots_on_nodes(self.config), self.capacity)


def fits(wanted: Iterable[float], capacity: Iterable[float]) -> bool:
    """Return True if the nodes can hold these ranks, largest demand on the largest node."""
    largest, demand = sorted(capacity, reverse=True), sorted(wanted, reverse=True)
    return len(largest) >= len(demand) and all(
        has >= slots for has, slots in zip(largest, demand, strict=False)
    )


def max_ranks(wanted: Sequence[int], capacity: Mapping[str, int]) -> dict[str, int]:
    """Return the largest number of ranks that each node may get, from those wanted on nodes.

    Ray chooses where several fit. If the ranks do not fit, the largest nodes get the most.
    """
    demand = sorted(wanted, reverse=True)
    if not fits(wanted, capacity.values()):
        largest = sorted(capacity, key=lambda node: -capacity[node])
        return dict.fromkeys(capacity, 0) | dict(zip(largest, demand, strict=False))
    found = dict.fromkeys(capacity, 0)
    for node in capacity:
        others = [has for other, has in capacity.items() if other != node]
        for index, slots in enumerate(demand):
            rest = demand[:index] + demand[index + 1 :]
            if slots <= capacity[node] and fits(rest, others):
                found[node] = slots
                break
    return found


@dataclass(frozen=True)
class ProbeGroup:
    """Nodes with given names, addresses and calls (`NodeProbes`)."""

    nodes: list[str]
    addresses: dict[str, str]
    call_each: Callable[..., dict[str, ProbeResult]]


def subset(agents: NodeProbes, nodes: Container[str]) -> NodeProbes:
    """Return the same probes for some nodes only."""
    kept = [node for node in agents.nodes if node in nodes]
    return ProbeGroup(kept, {node: agents.addresses[node] for node in kept}, agents.call_each)


def gather(
    agents: NodeProbes,
    check: str,
    probe: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 30.0,
) -> Gathered:
    """Call a probe with the same arguments on every node; return values and failures by node."""
    return gather_each(agents, check, probe, dict.fromkeys(agents.nodes, arguments), timeout_s)


def gather_each(
    agents: NodeProbes,
    check: str,
    probe: Callable[..., Any],
    arguments: Mapping[str, tuple[Any, ...]],
    timeout_s: float,
) -> Gathered:
    """Call a probe on the nodes that have arguments; return the same as `gather`."""
    answers = agents.call_each(probe, arguments, timeout_s)
    values = {node: answer.value for node, answer in answers.items() if not answer.error}
    advice = "Check that it is up and its disk is not full (ssh {0}); Ray's logs are in /tmp/ray"
    failures = [
        fail(check, node, f"the node does not answer: {answer.error}", advice.format(node))
        for node, answer in answers.items()
        if answer.error
    ]
    return values, failures
