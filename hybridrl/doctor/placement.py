"""Placement stage: room for all ranks, and each rollout engine on one node.

Imports Ray inside functions: it may be missing or too old.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.config.planner.world import sampling_slots_on_nodes, slots_on_nodes
from hybridrl.doctor.context import CheckContext, fits
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn

if TYPE_CHECKING:
    from hybridrl.controller.ray.ray_probes import FreeNode

SLOTS, ENGINES = "placement.slots", "placement.engines"


def check(context: CheckContext) -> list[Finding]:
    """Check placement.slots and placement.engines."""
    from hybridrl.controller.ray.ray_probes import RayProbes, free_nodes

    wanted, config = slots_on_nodes(context.config), context.config
    ranks_per_engine = config.rollout.tensor_parallel_size
    allow = config.placement.allow_straddle
    sampling = sampling_slots_on_nodes(config)
    engines = judge_engines(sampling, ranks_per_engine, allow_straddle=allow)
    if isinstance(context.agents, RayProbes):
        return [judge_slots(free_nodes(), wanted, on_gpu=context.on_gpu), engines]
    if len(wanted) > 1:
        return [skipped(SLOTS, "all", "Ray does not run yet"), engines]
    # Without a cluster the checks of the config have counted this machine's slots.
    found = f"{wanted[0]} rank(s); this machine has {context.machine.describe()}"
    return [ok(SLOTS, context.agents.nodes[0], found), engines]


def judge_slots(nodes: "Sequence[FreeNode]", wanted: Sequence[int], *, on_gpu: bool) -> Finding:
    """Judge placement.slots, largest demand on the largest node."""
    what = "GPUs" if on_gpu else "CPUs"
    counts = [(n.free_gpus, n.gpus) if on_gpu else (n.free_cpus, n.cpus) for n in nodes]
    # Ranks without a GPU share cores of the run, but not a core of another run.
    demand = wanted if on_gpu else [min(slots, 1) for slots in wanted]
    each = "; ".join(
        f"{node.node}: {free:g} of {total:g} {what} free"
        for node, (free, total) in zip(nodes, counts, strict=True)
    )
    evidence = f"{each}; the run wants {', '.join(map(str, wanted))} ranks"
    advice = (
        "`ray status` shows what is in use, `ray list actors --filter state=ALIVE` by which actor. "
        "End that run, start Ray on more nodes, or lower cluster.nodes or cluster.gpus_per_node."
    )
    if fits(demand, [free for free, _ in counts]):
        return ok(SLOTS, "all", evidence)
    return fail(SLOTS, "all", evidence, advice)


def judge_engines(wanted: Sequence[int], ranks_per_engine: int, *, allow_straddle: bool) -> Finding:
    """Judge placement.engines: consecutive ranks of an engine share a node."""
    from hybridrl.controller.placement import Slot, straddling_engines

    slots = [Slot(str(n), "0.0.0.0", k) for n, count in enumerate(wanted) for k in range(count)]
    engines, astride = len(slots) // ranks_per_engine, straddling_engines(slots, ranks_per_engine)
    if not astride:
        return ok(ENGINES, "all", f"{engines} engine(s) of {ranks_per_engine}, one node each")
    evidence = f"engine(s) {', '.join(map(str, astride))} of {engines} lie on several nodes"
    advice = (
        "Set rollout.tensor_parallel_size to a divisor of every node's ranks: otherwise "
        "activations cross nodes in every layer."
    )
    return (warn if allow_straddle else fail)(ENGINES, "all", evidence, advice)
