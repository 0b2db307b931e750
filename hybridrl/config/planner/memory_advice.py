"""Advice for a run that does not fit into GPU memory: settings, or more GPUs."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from hybridrl.config.planner.memory import Phase, gib
from hybridrl.config.planner.switches import Change, MemoryCase, cheapest, memory_changes
from hybridrl.config.planner.world import world_size
from hybridrl.config.schema import RunConfig

# GPUs of a full node, and of the largest run.
NODE_GPUS, MOST_GPUS = 8, 1024


class Remedy(NamedTuple):
    """Settings with which a run fits, more GPUs included.

    Attributes:
        sizes: settings for more GPUs; none if those of the case are enough.
        changes: other settings.
        case: the run with all of them.
    """

    sizes: list[Change]
    changes: list[Change]
    case: MemoryCase

    def __str__(self) -> str:
        return " ".join(map(str, [*self.sizes, *self.changes]))


class Saving(NamedTuple):
    """Memory that a setting alone saves in the largest phase, and its cost in time."""

    change: Change
    saved_bytes: int
    seconds: float


def savings(case: MemoryCase) -> list[Saving]:
    """Return the settings that save memory in the largest phase, by key, weaker ones first."""
    worst, seconds = case.worst(), case.seconds()
    found = []
    for change in chain(*memory_changes(case.config), *_rollout_changes(case.config)):
        then = case.changed([change])
        saved = worst.total - next(p.total for p in then.phases() if p.name == worst.name)
        if saved > 0:
            found.append(Saving(change, saved, then.seconds() - seconds))
    return found


def remedy(case: MemoryCase, room: float = 1.0) -> Remedy | None:
    """Return the settings with which a run fits: on its GPUs, else on the fewest; None if none.

    `room` is the share of a GPU to fit into.
    """
    for larger, sizes in [(case, []), *_more_gpus(case)]:
        for rollout in _rollout_changes(larger.config):
            base = larger.changed(rollout)
            found = cheapest(base, memory_changes(base.config), room)
            if found is not None:
                changes = [*found, *rollout]
                return Remedy(sizes, changes, larger.changed(changes))
    return None


def advice(case: MemoryCase, worst: Phase) -> str:
    """List what each setting saves in the largest phase, and some that fit together."""
    strongest = {saving.change.key: saving for saving in savings(case)}
    saved = ", ".join(f"{s.change} {gib(s.saved_bytes)}" for s in strongest.values())
    alone = f"Alone these save in {worst.name}: {saved}.\n" if saved else ""
    found = remedy(case)
    if found is None:
        return f"{alone}Set a smaller model.path, or train adapters (lora=default)."
    gpus = [world_size(one.config) for one in (case, found.case)]
    how = (
        f"It does not fit {gpus[0]} GPU{'s' * (gpus[0] > 1)}, but {gpus[1]}: set"
        if found.sizes
        else "Set"
    )
    return f"{alone}{how} {found}: {gib(found.case.peak())} at most."


def _rollout_changes(config: RunConfig) -> Iterator[list[Change]]:
    """Yield nothing, larger engines, and other shares of the GPU for them, nearest first."""
    tp, share = config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization
    yield []
    yield from ([Change("rollout.tensor_parallel_size", tp * 2**power)] for power in range(1, 4))
    shares = sorted((tenths / 10 for tenths in range(2, 10)), key=lambda other: abs(other - share))
    yield from ([Change("rollout.gpu_memory_utilization", s)] for s in shares if s != share)


def _more_gpus(case: MemoryCase) -> Iterator[tuple[MemoryCase, list[Change]]]:
    """Yield the same run on 2, 4, 8... times as many GPUs, nodes filled first; and its settings."""
    config = case.config
    nodes, gpus = config.cluster.nodes, config.cluster.gpus_per_node
    assert gpus is not None
    while 2 * nodes * gpus <= MOST_GPUS:
        nodes, gpus = (nodes, 2 * gpus) if 2 * gpus <= NODE_GPUS else (2 * nodes, gpus)
        sizes = [Change("cluster.nodes", nodes), Change("cluster.gpus_per_node", gpus)]
        sizes = [size for size in sizes if case.changed([size]).config != config]
        if config.placement.slots_on_nodes is not None:
            sizes.append(Change("placement.slots_on_nodes", None))
        mesh = Change("fsdp.dp_shard", nodes * gpus // config.fsdp.dp_replicate)
        yield case.changed([*sizes, mesh]), sizes
