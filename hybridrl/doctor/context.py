"""Run and nodes under examination, with the number of ranks that each node may get."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import Machine, local_machine
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.world import slots_on_nodes
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.node_probes import NodeProbes, call_all

MACHINE_TIMEOUT_S = 60.0
RAY_AGENTS = "hybridrl.controller.ray.ray_probes"


@dataclass(frozen=True)
class CheckContext:
    """Input of every stage.

    Attributes:
        config: of the run, checked and resolved.
        machine: nodes that the run may use.
        shape: sizes of the model.
        reward_shape: sizes of the reward model; None without one.
        overrides: of the command line, for the last stage.
        agents: the nodes.
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
