"""Whether the ranks of the run find room, and its rollout engines whole nodes.

Imports Ray, which may be missing or too old, inside functions: the stage of Ray comes first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.config.checks.sizes import slots_on_nodes
from hybridrl.config.choices import Accelerator
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.stages import Case

if TYPE_CHECKING:
    from hybridrl.controller.ray.nodes import FreeNode

SLOTS, ENGINES = "placement.slots", "placement.engines"


def check(case: Case) -> list[Finding]:
    """Both checks; without a cluster the config's own checks have counted this machine's slots."""
    from hybridrl.controller.ray.nodes import free_nodes
    from hybridrl.controller.ray.ray_probes import RayProbes

    wanted = slots_on_nodes(case.config)
    engines = judge_engines(
        wanted,
        case.config.rollout.tensor_parallel_size,
        allow_straddle=case.config.placement.allow_straddle,
    )
    if isinstance(case.agents, RayProbes):
        on_gpu = case.config.hardware.accelerator is Accelerator.gpu
        return [judge_slots(free_nodes(), wanted, on_gpu=on_gpu), engines]
    if len(wanted) > 1:
        return [skipped(SLOTS, "all", "Ray does not run yet"), engines]
    found = f"{wanted[0]} rank(s); this machine has {case.machine.describe()}"
    return [ok(SLOTS, case.agents.nodes[0], found), engines]


def judge_slots(nodes: "Sequence[FreeNode]", wanted: Sequence[int], *, on_gpu: bool) -> Finding:
    """Whether as many nodes have as many free slots, the largest demand on the largest node."""
    what = "GPUs" if on_gpu else "CPUs"
    free = sorted((n.free_gpus if on_gpu else n.free_cpus for n in nodes), reverse=True)
    # A rank without a GPU takes what share of a core there is, but not a core of another run.
    demand = sorted(wanted if on_gpu else [min(slots, 1) for slots in wanted], reverse=True)
    evidence = "; ".join(
        f"{n.node}: {n.free_gpus if on_gpu else n.free_cpus:g} of "
        f"{n.gpus if on_gpu else n.cpus:g} {what} free"
        for n in nodes
    )
    evidence = f"{evidence}; the run wants {', '.join(map(str, wanted))} ranks"
    if len(free) >= len(demand) and all(f >= d for f, d in zip(free, demand, strict=False)):
        return ok(SLOTS, "all", evidence)
    return fail(
        SLOTS,
        "all",
        evidence,
        "`ray status` says what is held, `ray list actors --filter state=ALIVE` by whom. End that "
        "run, start Ray on more nodes, or lower cluster.nodes or cluster.gpus_per_node.",
    )


def judge_engines(wanted: Sequence[int], ranks_per_engine: int, *, allow_straddle: bool) -> Finding:
    """Whether an engine's consecutive ranks share a node, with ranks in the order of nodes."""
    from hybridrl.controller.placement import Slot, straddling_engines

    slots = [
        Slot(str(node), "0.0.0.0", number)
        for node, count in enumerate(wanted)
        for number in range(count)
    ]
    engines = len(slots) // ranks_per_engine
    astride = straddling_engines(slots, ranks_per_engine)
    if not astride:
        return ok(ENGINES, "all", f"{engines} engine(s) of {ranks_per_engine}, each on one node")
    evidence = f"engine(s) {', '.join(map(str, astride))} of {engines} lie on several nodes"
    advice = (
        "Set rollout.tensor_parallel_size to a divisor of every node's ranks: an engine that "
        "straddles sends activations from node to node in every layer."
    )
    return (warn if allow_straddle else fail)(ENGINES, "all", evidence, advice)
