"""Settings that trade time for GPU memory: what each saves and costs, and the fastest that fit.

Every candidate is set in a copy of the config, whose memory and time are predicted again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

from hybridrl.config.checks.installation import is_current
from hybridrl.config.checks.sizes import (
    cache_problems,
    engine_problems,
    tensor_parallel_problems,
)
from hybridrl.config.choices import Accumulation, Offload, SleepMode
from hybridrl.config.planner.machine import GPU, Machine
from hybridrl.config.planner.memory import (
    GIB,
    LEFT_FOR_CACHE,
    MIB,
    Phase,
    gib,
    host_parts,
    largest,
    rank_phases,
    tightest_node,
)
from hybridrl.config.planner.shape import Frozen, ModelShape
from hybridrl.config.planner.step_time import step_seconds
from hybridrl.config.planner.world import training_ranks, world_size
from hybridrl.config.schema import RunConfig

# vLLM's KV cache and buffers.
LEAST_CACHE = GIB
# Share of a GPU that chosen settings fill, if some do: torch's allocator keeps 1.14 to 1.18
# times what tensors take at their peak (benchmarks/RESULTS.md).
ROOM = 0.86
# GPUs of a full node, and of the largest run.
NODE_GPUS, MOST_GPUS = 8, 1024


class Change(NamedTuple):
    """A setting to try."""

    key: str
    value: Any

    def __str__(self) -> str:
        words = {"True": "true", "False": "false", "None": "null"}
        return f"{self.key}={words.get(str(self.value), self.value)}"


# Values of the settings that may be null, where these fit.
FASTEST = (
    Change("fsdp.accumulation", Accumulation.full),
    Change("fsdp.activation_checkpointing", False),
    Change("fsdp.offload", Offload.none),
    Change("rollout.sleep", SleepMode.none),
    Change("actor.max_tokens_per_gpu", 16384),
)
# Chosen after those, one by one, where they fit: they save the least time.
FASTER_STILL = (
    Change("fsdp.reshard_after_forward", False),
    Change("actor.max_tokens_per_gpu", 32768),
)


def with_changes(config: RunConfig, changes: Iterable[Change]) -> RunConfig:
    """Copy a config with other settings, and with what follows from them."""
    for change in changes:
        section, name = change.key.split(".")
        changed = replace(vars(config)[section], **{name: change.value})
        config = replace(config, **{section: changed})
        linked = {}
        if change.key == "rollout.tensor_parallel_size":
            linked = {"tensor_parallel_size": change.value}
        elif section in ("cluster", "placement"):
            linked = {"dp_shard": training_ranks(config) // config.fsdp.dp_replicate}
        config = replace(config, fsdp=replace(config.fsdp, **linked))
    return config


class MemoryCase(NamedTuple):
    """Inputs of a memory prediction; `machine` has GPUs, of which the smallest counts."""

    config: RunConfig
    shape: ModelShape
    frozen: Frozen
    machine: Machine

    @property
    def gpu(self) -> GPU:
        """The GPU with the least memory."""
        return min(self.machine.gpus, key=lambda gpu: gpu.memory_bytes)

    def changed(self, changes: Iterable[Change]) -> "MemoryCase":
        """Return the case with other settings."""
        return self._replace(config=with_changes(self.config, changes))

    def phases(self) -> list[Phase]:
        """Predict memory by phase."""
        return rank_phases(self.config, self.shape, self.gpu.memory_bytes, self.frozen)

    def worst(self) -> Phase:
        """Return the largest phase."""
        return largest(self.phases())

    def peak(self) -> int:
        """Return the memory of the largest phase."""
        return self.worst().total

    def tightest_node(self) -> tuple[int, int, int]:
        """Return (ranks, needed RAM, available RAM) of the node with the least spare RAM."""
        parts = host_parts(self.config, self.shape, self.frozen)
        return tightest_node(self.config, self.machine, sum(parts.values()))

    def fits(self, room: float = 1.0) -> bool:
        """Return whether the run fits into this share of the GPU, and into the node."""
        phases = self.phases()
        return (
            largest(phases).total <= room * self.gpu.memory_bytes
            and phases[1].parts.get(LEFT_FOR_CACHE, LEAST_CACHE) >= LEAST_CACHE
            and self.has_engines()
            and self.has_ram()
        )

    def has_ram(self) -> bool:
        """Return whether the processes fit into the RAM of each node."""
        _, needed, available = self.tightest_node()
        return needed <= available

    def has_engines(self) -> bool:
        """Return whether rollout engines of this size are possible, and hold a sequence."""
        of_model = (tensor_parallel_problems, cache_problems)
        engines = (check(self.config, self.shape) for check in of_model)
        return not any(chain(engine_problems(self.config), *engines))

    def seconds(self) -> float:
        """Estimate a step."""
        return sum(step_seconds(self.config, self.shape, self.frozen, self.gpu).values())


class Saving(NamedTuple):
    """Memory that a setting alone saves in the largest phase, and its cost in time."""

    change: Change
    saved_bytes: int
    seconds: float


def savings(case: MemoryCase) -> list[Saving]:
    """Return the settings that save memory in the largest phase, by key, weaker ones first.

    Engines that the run refuses are left out.
    """
    worst, seconds = case.worst(), case.seconds()
    savings = []
    for change in chain(*memory_changes(case.config), *_rollout_changes(case.config)):
        then = case.changed([change])
        saved = worst.total - next(p.total for p in then.phases() if p.name == worst.name)
        if saved > 0 and then.has_engines():
            savings.append(Saving(change, saved, then.seconds() - seconds))
    return savings


def remedy(case: MemoryCase) -> list[Change] | None:
    """Return the settings with which a run fits: on its GPUs, else on the fewest; None if none.

    Settings that fit into `ROOM` come first, then those that fill the GPUs.
    """
    for sizes, room in product(([], *_more_gpus(case.config)), (ROOM, 1.0)):
        for rollout in _rollout_changes(case.config):
            base = case.changed([*sizes, *rollout])
            changes = cheapest(base, memory_changes(base.config), room)
            if changes is not None:
                return [*sizes, *changes, *rollout]
    return None


def advice(case: MemoryCase, changes: list[Change] | None) -> str:
    """Describe the `remedy` of a run that does not fit."""
    if changes is None:
        return (
            "No settings make it fit, on any number of GPUs: set a smaller model.path, or train "
            "adapters (lora=default)."
        )
    then = case.changed(changes)
    gpus, more = world_size(case.config), world_size(then.config)
    how = (
        f"No settings make it fit on {gpus} GPU{'s' * (gpus > 1)}. On {more} GPUs it fits: set"
        if more > gpus
        else "Set"
    )
    return f"{how} {' '.join(map(str, changes))}: {gib(then.peak())} at most."


def memory_changes(config: RunConfig) -> list[list[Change]]:
    """List settings that need less memory in updates, by key, weaker ones first."""
    offloads, modes = list(Offload), list(SleepMode)
    stronger = offloads[offloads.index(config.fsdp.offload) + 1 :]
    deeper = [] if config.rollout.keep_kv else modes[modes.index(config.rollout.sleep) + 1 :]
    if not is_current():
        deeper = [mode for mode in deeper if mode is not SleepMode.kv_cache]
    changes = [
        [Change("fsdp.accumulation", Accumulation.sharded)],
        [Change("fsdp.activation_checkpointing", True)],
        [Change("fsdp.reshard_after_forward", True)],
        [Change("fsdp.offload", value) for value in stronger],
        [Change("rollout.sleep", value) for value in deeper],
        [*_smaller_batches(config)],
    ]
    return [different for of_key in changes if (different := _different(config, of_key))]


def _different(config: RunConfig, changes: Iterable[Change]) -> list[Change]:
    """Return the settings that the config does not have."""
    return [change for change in changes if with_changes(config, [change]) != config]


def _smaller_batches(config: RunConfig) -> Iterator[Change]:
    """Yield smaller micro-batches, down to one sequence."""
    rollout, tokens = config.rollout, config.actor.max_tokens_per_gpu
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // config.fsdp.ulysses_size)
    for half in (tokens // 2**power for power in range(1, 6)):
        if half >= least:
            yield Change("actor.max_tokens_per_gpu", half)


def _rollout_changes(config: RunConfig) -> Iterator[list[Change]]:
    """Yield nothing, larger engines, and smaller caches or other shares of the GPU for them."""
    tp, share = config.rollout.tensor_parallel_size, config.rollout.gpu_memory_utilization
    yield []
    yield from ([Change("rollout.tensor_parallel_size", tp * 2**power)] for power in range(1, 4))
    if (cache := config.rollout.kv_cache_mb) is not None:  # then the share has no effect
        halves = (cache // 2**power for power in range(1, 6))
        yield from ([Change("rollout.kv_cache_mb", h)] for h in halves if h * MIB >= LEAST_CACHE)
        return
    shares = sorted((tenths / 10 for tenths in range(2, 10)), key=lambda other: abs(other - share))
    yield from ([Change("rollout.gpu_memory_utilization", s)] for s in shares if s != share)


def _more_gpus(config: RunConfig) -> Iterator[list[Change]]:
    """Yield the settings of 2, 4, 8... times as many GPUs, nodes filled first."""
    nodes, gpus = config.cluster.nodes, config.cluster.gpus_per_node
    sampling = config.placement.rollout_gpus
    assert gpus is not None
    while 2 * nodes * gpus <= MOST_GPUS:
        nodes, gpus = (nodes, 2 * gpus) if 2 * gpus <= NODE_GPUS else (2 * nodes, gpus)
        sampling = sampling and 2 * sampling
        sizes = [
            Change("cluster.nodes", nodes),
            Change("cluster.gpus_per_node", gpus),
            Change("placement.rollout_gpus", sampling),
        ]
        yield _different(config, [*sizes, Change("placement.slots_on_nodes", None)])


def cheapest(
    case: MemoryCase, changes: Sequence[Sequence[Change]], room: float = 1.0
) -> list[Change] | None:
    """Return the settings, at most one of each list, that fit and cost the fewest seconds.

    Of equal ones those with fewer changes; None if none fit.
    """
    strongest = [of_key[-1] for of_key in changes]
    # A single micro-batch may need less than several, whose gradients are kept.
    one_batch = [change for change in strongest if change.key != "actor.max_tokens_per_gpu"]
    limit = room * case.gpu.memory_bytes
    if min(case.changed(least).peak() for least in (strongest, one_batch)) > limit:
        return None
    choices = product(*([None, *of_key] for of_key in changes))
    combinations = [[change for change in choice if change] for choice in choices]
    combinations.sort(key=lambda choice: (round(case.changed(choice).seconds(), 3), len(choice)))
    return next((choice for choice in combinations if case.changed(choice).fits(room)), None)
