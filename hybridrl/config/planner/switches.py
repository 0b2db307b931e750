"""Settings that trade time for GPU memory: what each saves and costs, and the cheapest that fit.

Every candidate is set in a copy of the config, whose memory and time are predicted again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from hybridrl.config.checks.sizes import engine_problems, tensor_parallel_problems
from hybridrl.config.choices import Accumulation, Offload
from hybridrl.config.planner.machine import GPU, Machine
from hybridrl.config.planner.memory import GIB, LEFT_FOR_CACHE, Phase, node_ram, rank_phases
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.planner.step_time import step_seconds
from hybridrl.config.schema import RunConfig

# vLLM's KV cache and buffers.
LEAST_CACHE = GIB
# Share of a GPU that chosen settings fill, if some do: torch's allocator keeps 1.14 times what
# tensors take at their peak (benchmarks/RESULTS.md).
ROOM = 0.88


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
    Change("actor.max_tokens_per_gpu", 16384),
)


def with_changes(config: RunConfig, changes: Iterable[Change]) -> RunConfig:
    """Copy a config with other settings, links to them included."""
    for change in changes:
        section, name = change.key.split(".")
        changed = replace(vars(config)[section], **{name: change.value})
        config = replace(config, **{section: changed})
        if change.key == "rollout.tensor_parallel_size":
            fsdp = replace(config.fsdp, tensor_parallel_size=change.value)
            config = replace(config, fsdp=fsdp)
    return config


class MemoryCase(NamedTuple):
    """Inputs of a memory prediction, and its limits: the smallest GPU and the smallest node."""

    config: RunConfig
    shape: ModelShape
    reward_shape: ModelShape | None
    gpu: GPU
    node_bytes: int

    @classmethod
    def of(
        cls,
        config: RunConfig,
        shape: ModelShape,
        reward_shape: ModelShape | None,
        machine: Machine,
    ) -> "MemoryCase":
        """Return the case of a machine with GPUs."""
        gpu = min(machine.gpus, key=lambda gpu: gpu.memory_bytes)
        node_bytes = min(node.memory_bytes for node in machine.nodes)
        return cls(config, shape, reward_shape, gpu, node_bytes)

    def changed(self, changes: Iterable[Change]) -> "MemoryCase":
        """Return the case with other settings."""
        return self._replace(config=with_changes(self.config, changes))

    def phases(self) -> list[Phase]:
        """Predict memory by phase."""
        return rank_phases(self.config, self.shape, self.gpu.memory_bytes, self.reward_shape)

    def worst(self) -> Phase:
        """Return the largest phase."""
        return max(self.phases(), key=lambda phase: phase.total)

    def peak(self) -> int:
        """Return the memory of the largest phase."""
        return self.worst().total

    def fits(self, room: float = 1.0) -> bool:
        """Return whether the run fits into this share of the GPU, and into the node."""
        phases = self.phases()
        return (
            max(phase.total for phase in phases) <= room * self.gpu.memory_bytes
            and phases[1].parts.get(LEFT_FOR_CACHE, LEAST_CACHE) >= LEAST_CACHE
            and not any(engine_problems(self.config))
            and not any(tensor_parallel_problems(self.config, self.shape))
            and node_ram(self.config, self.shape, self.reward_shape) <= self.node_bytes
        )

    def seconds(self) -> float:
        """Estimate a step."""
        return sum(step_seconds(self.config, self.shape, self.reward_shape, self.gpu).values())


def memory_changes(config: RunConfig) -> list[list[Change]]:
    """List settings that need less memory in updates, by key, weaker ones first."""
    offloads = list(Offload)
    stronger = offloads[offloads.index(config.fsdp.offload) + 1 :]
    changes = [
        [Change("fsdp.accumulation", Accumulation.sharded)],
        [Change("fsdp.activation_checkpointing", True)],
        [Change("fsdp.reshard_after_forward", True)],
        [Change("fsdp.offload", value) for value in stronger],
        [*_smaller_batches(config)],
    ]
    found = [[c for c in of_key if with_changes(config, [c]) != config] for of_key in changes]
    return [of_key for of_key in found if of_key]


def _smaller_batches(config: RunConfig) -> Iterator[Change]:
    """Yield smaller micro-batches, down to one sequence."""
    rollout, tokens = config.rollout, config.actor.max_tokens_per_gpu
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    least = -(-longest // config.fsdp.ulysses_size)
    for half in (tokens // 2**power for power in range(1, 6)):
        if half >= least:
            yield Change("actor.max_tokens_per_gpu", half)


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
    found = [[change for change in choice if change] for choice in choices]
    found.sort(key=lambda choice: (round(case.changed(choice).seconds(), 3), len(choice)))
    return next((choice for choice in found if case.changed(choice).fits(room)), None)
