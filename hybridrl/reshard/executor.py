"""Executor of one plan: copies this rank's shards into the engine's live parameters.

    shards (float32) -> cast and copy what stays on this rank ----------------> live parameters
                     -> cast and pack -> bucket -> exchange -> bucket -> unpack ->

While a bucket is exchanged, the next one is packed and the previous one unpacked.
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
from hybridrl.reshard.buffers import Buffers
from hybridrl.reshard.copies import Copier, build_copier
from hybridrl.reshard.exchange import BucketExchange, gather
from hybridrl.reshard.fingerprint import Hashes
from hybridrl.reshard.lowering import LoweredPlan
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.rects import CopyRect
from hybridrl.reshard.source_layout import SourceLayout
from hybridrl.reshard.verify import FingerprintSums


class ReshardError(RuntimeError):
    """Weights cannot be moved, or did not arrive as they were sent."""


@dataclass(frozen=True)
class Destination:
    """Target of a reshard: one rank of a rollout engine.

    Attributes:
        trace: trace of the engine's loader on this rank.
        tensors: the engine's live parameters by name; their storage stays where it is.
        load: the engine's own loader, for parameters that the trace refused.
        dtype: dtype to which weights are cast before they move.
    """

    trace: Trace
    tensors: dict[str, Tensor]
    load: Callable[[Iterable[tuple[str, Tensor]]], Any]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.tensors.values())).device


class PlanExecutor:
    """Executes one rank's plan. `prepare` and `move` are collectives of the shard group.

    Args:
        plan: plan of some of the weights.
        shards: shards of these weights.
        sources: layouts of these weights.
        destination: this rank's part of a rollout engine.
        group: the shard group.
        hashes: for fingerprints.

    Attributes:
        sums: fingerprints sent by the last `move` with fingerprints.
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
        self.staging = BucketExchange(plan.buckets, group, destination.dtype, destination.device)
        self.sums = FingerprintSums(dist.get_world_size(group), len(plan.parameters))
        shapes = destination.trace.parameters
        self.lowered = LoweredPlan(plan, rank, sources, shapes, self.sums)
        self._buffers = Buffers(destination.device)

    @torch.no_grad()
    def prepare(self) -> None:
        """Allocate staging memory and look up the addresses of all buffers."""
        self.staging.allocate()
        shards = self._local_shards()
        parameters = [self._destination.tensors[name] for name in self.plan.parameters]
        if self._buffers.bind([*shards, *parameters, *self.staging.halves]):
            numbers = range(len(self.plan.buckets))
            self._local = self._copier(self.lowered.local())
            self._pack = [self._copier(self.lowered.pack(number)) for number in numbers]
            self._unpack = [self._copier(self.lowered.unpack(number)) for number in numbers]
            self.sums.allocate(self._destination.device)

    @torch.no_grad()
    def move(self, *, fingerprint: bool) -> None:
        """Enqueue the move; on GPUs it runs on the current stream and on the group's own."""
        destination, plan = self._destination, self.plan
        if plan.gathered:
            destination.load(
                (shard.name, self._gathered(shard, source))
                for shard, source in zip(self._shards, self._sources, strict=True)
                if shard.name in plan.gathered
            )
        for fill in plan.fills:
            region_view(destination.tensors[fill.parameter], fill.region).fill_(fill.value)
        self._run_buckets(self.sums.values.zero_() if fingerprint else None)

    def release(self) -> None:
        """Free staging memory and drop references to the shards."""
        self._buffers.release()
        self.staging.free()

    def _copier(self, rects: list[CopyRect]) -> Copier:
        return build_copier(rects, self._buffers, self._destination.dtype, self._hashes)

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
        """Run all buckets; packing is one bucket ahead, so that the links never wait for it.

        A half of the staging memory is packed again only after it was unpacked: both run on one
        stream. Local copies are spread over the buckets if the exchange dominates. Otherwise they
        come first, so that the device works while the exchange is prepared.
        """
        count, spread = len(self.plan.buckets), self.plan.exchanges_much
        if not spread:
            self._local.run(0, 1, sums, paced=False)
        in_flight = self._start_bucket(0, sums, paced=False) if count else []
        for number in range(count):
            position.at("bucket", number + 1, count)
            arriving, is_last = in_flight, number + 1 == count
            if not is_last:
                in_flight = self._start_bucket(number + 1, sums, paced=spread)
            if spread:
                self._local.run(number, count, sums, paced=True)
            for work in arriving:
                work.wait()
            self._unpack[number].run(0, 1, None, paced=spread and not is_last)
            self._mark(number + 1, count)

    def _mark(self, number: int, count: int) -> None:
        """Publish an event that the device passes after a bucket."""
        if self._destination.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            position.mark("bucket", number, count, event)

    def _start_bucket(self, number: int, sums: Tensor | None, *, paced: bool) -> list[Any]:
        """Pack a bucket and start its exchange; return the works to wait for."""
        self._pack[number].run(0, 1, sums, paced=paced)
        return self.staging.start(number)


def region_view(tensor: Tensor, region: Region) -> Tensor:
    """Return a region of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
