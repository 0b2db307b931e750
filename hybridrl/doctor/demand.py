"""How many ranks each node may get, and whether the run finds room without some of them.

A node's *room* is the largest number of ranks, of those that the run wants of its nodes, that it
can take; 0: none. Which node gets which number is Ray's choice wherever several fit.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence

from hybridrl.config.checks.sizes import slots_on_nodes
from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import local_machine
from hybridrl.config.schema import RunConfig
from hybridrl.controller.ray.node_probes import NodeProbes, call_all

LOOK_S = 60.0
RAY_AGENTS = "hybridrl.controller.ray.ray_probes"


def rooms(agents: NodeProbes, config: RunConfig) -> dict[str, int]:
    """Each node's room: by what Ray may hand out, or without Ray by its GPUs."""
    wanted = slots_on_nodes(config)
    on_gpu = config.hardware.accelerator is Accelerator.gpu
    if RAY_AGENTS in sys.modules:  # else these are others, and Ray may be missing
        from hybridrl.controller.ray.ray_probes import RayProbes

        if isinstance(agents, RayProbes):
            return agents.ranks_that_fit(wanted, on_gpu=on_gpu)
    if not on_gpu or len(set(wanted)) == 1:
        return dict.fromkeys(agents.nodes, max(wanted))
    answers = call_all(agents, local_machine, timeout_s=LOOK_S)
    gpus = {node: 0 if a.error else len(a.value.gpus) for node, a in answers.items()}
    return {
        node: max((slots for slots in wanted if slots <= count), default=0)
        for node, count in gpus.items()
    }


def find_room(wanted: Sequence[int], there: Iterable[int]) -> bool:
    """Whether as many nodes have room for as many ranks, the largest demand on the largest."""
    largest = sorted(there, reverse=True)
    demand = sorted(wanted, reverse=True)
    return len(largest) >= len(demand) and all(
        room >= slots for room, slots in zip(largest, demand, strict=False)
    )


def may_get(wanted: Sequence[int], there: Mapping[str, int]) -> dict[str, int]:
    """The most ranks that each node may be given; 0: none come there.

    Where the ranks find no room at all, the largest nodes are to have the largest numbers.

    Args:
        wanted: ranks on each node of the run.
        there: rooms by node.
    """
    if not find_room(wanted, there.values()):
        largest = sorted(there, key=lambda node: -there[node])
        demand = sorted(wanted, reverse=True)
        return dict.fromkeys(there, 0) | dict(zip(largest, demand, strict=False))
    return {node: _most(node, wanted, there) for node in there}


def _most(node: str, wanted: Sequence[int], there: Mapping[str, int]) -> int:
    others = [room for other, room in there.items() if other != node]
    for slots in sorted(set(wanted), reverse=True):
        rest = list(wanted)
        rest.remove(slots)
        if slots <= there[node] and find_room(rest, others):
            return slots
    return 0
