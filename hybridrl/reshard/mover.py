"""Carries out one plan: from this rank's shards into the rollout engine's live parameters.

    shards (float32) -> cast and copy what stays on this rank ----------------> live parameters
                     -> cast and pack -> bucket -> exchange -> bucket -> unpack ->

While a bucket is on its way, the next one is packed and the one before unpacked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed import position
from hybridrl.distributed.regions import Region, Trace
from hybridrl.distributed.shards import NamedShard
from hybridrl.reshard.copies import Buffers
from hybridrl.reshard.exchange import Staging, gather
from hybridrl.reshard.fingerprint import Hashes
from hybridrl.reshard.layout import SourceLayout
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.tables import Tables, build_programs
from hybridrl.reshard.verify import Sums


class ReshardError(RuntimeError):
    """The weights cannot be moved, or did not arrive as they were sent."""


@dataclass(frozen=True)
class Destination:
    """Where the weights go: one rank of a rollout engine.

    Attributes:
        trace: what the engine's loader does on this rank.
        tensors: the engine's live parameters by name; their storage stays where it is.
        load: the engine's own loader, for what the trace refused.
        dtype: to which weights are cast before they move.
    """

    trace: Trace
    tensors: dict[str, Tensor]
    load: Callable[[Iterable[tuple[str, Tensor]]], Any]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(iter(self.tensors.values())).device


class Mover:
    """One rank's part of one plan. `prepare` and `move` are collectives of the shard group.

    Args:
        plan: of some of the weights.
        shards: of these weights.
        sources: layouts of these weights.
        destination: this rank's part of a rollout engine.
        group: the ranks that the plan numbers.
        hashes: for fingerprints.

    Attributes:
        sums: fingerprints of what was sent by the last `move` that took them.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Sequence[NamedShard],
        sources: Sequence[SourceLayout],
        destination: Destination,
        group: dist.ProcessGroup,
        hashes: Hashes,
    ) -> None:
        self.plan = plan
        self._shards = shards
        self._sources = sources
        rank = dist.get_rank(group)
        self._shapes = [torch.Size(source.region(rank).shape) for source in sources]
        self._destination = destination
        self._group = group
        self._hashes = hashes
        self.staging = Staging(plan.buckets, group, destination.dtype, destination.device)
        self.sums = Sums(dist.get_world_size(group), len(plan.parameters))
        shapes = destination.trace.parameters
        self.tables = Tables(plan, rank, sources, shapes, self.sums)
        self._buffers = Buffers(destination.device)

    @torch.no_grad()
    def prepare(self) -> None:
        """Take staging memory and look up where everything lies."""
        self.staging.allocate()
        shards = self._local_shards()
        parameters = [self._destination.tensors[name] for name in self.plan.parameters]
        if self._buffers.place([*shards, *parameters, *self.staging.halves]):
            self._programs = build_programs(
                self.tables, self._buffers, self._destination.dtype, self._hashes
            )
            self.sums.build(self._destination.device)

    @torch.no_grad()
    def move(self, *, fingerprint: bool) -> None:
        """Enqueue everything; on GPUs it runs on the current stream and on the group's own."""
        destination, plan = self._destination, self.plan
        if plan.gathered:
            destination.load(
                (shard.name, self._gathered(shard, source))
                for shard, source in zip(self._shards, self._sources, strict=True)
                if shard.name in plan.gathered
            )
        for fill in plan.fills:
            view(destination.tensors[fill.parameter], fill.region).fill_(fill.value)
        self._run_buckets(self.sums.values.zero_() if fingerprint else None)

    def release(self) -> None:
        """Let go of staging memory and of the shards."""
        self._buffers.release()
        self.staging.free()

    def _local_shards(self) -> list[Tensor]:
        tensors = []
        for shard, expected in zip(self._shards, self._shapes, strict=True):
            tensor = shard.local()
            if tensor.shape != expected or not tensor.is_contiguous():
                raise ReshardError(
                    f"{shard.name}: this rank's shard has shape {tuple(tensor.shape)}, "
                    f"planned was {tuple(expected)} of {shard.shape}, contiguous"
                )
            tensors.append(tensor)
        return tensors

    def _gathered(self, shard: NamedShard, source: SourceLayout) -> Tensor:
        position.at(f"gathering {shard.name}")
        return gather(shard.local(), source, self._group)

    def _run_buckets(self, sums: Tensor | None) -> None:
        """Packing is always one bucket ahead, so that the links never wait for it.

        A bucket's half of the staging memory is packed again only after the bucket was unpacked,
        because both run on one stream. Local copies are spread over the buckets if the links take
        long, and else come first, so that the device works while the exchange is prepared.
        """
        programs, count = self._programs, len(self.plan.buckets)
        spread = self.plan.exchanges_much
        if not spread:
            programs.local.run(0, 1, sums, paced=False)
        on_the_way = self._start_bucket(0, sums, paced=False) if count else []
        for number in range(count):
            position.at("bucket", number + 1, count)
            arriving, is_last = on_the_way, number + 1 == count
            if not is_last:
                on_the_way = self._start_bucket(number + 1, sums, paced=spread)
            if spread:
                programs.local.run(number, count, sums, paced=True)
            for work in arriving:
                work.wait()
            programs.unpack[number].run(0, 1, None, paced=spread and not is_last)
            self._mark(number + 1, count)

    def _mark(self, number: int, count: int) -> None:
        """Let it be seen when the device is done with a bucket."""
        if self._destination.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            position.mark("bucket", number, count, event)

    def _start_bucket(self, number: int, sums: Tensor | None, *, paced: bool) -> list[Any]:
        """Pack and send; what to wait for before unpacking."""
        self._programs.pack[number].run(0, 1, sums, paced=paced)
        return self.staging.start(number)


def view(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
