"""Executor of one plan: copies this rank's shards into the engine's live parameters.

    shards (float32) -> cast and copy what stays on this rank ----------------> live parameters
                     -> cast and pack -> bucket -> exchange -> bucket -> unpack ->

Buckets alternate between the two halves of the staging memory: while one is exchanged, the next is
packed into the other half, once that is unpacked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed import position
from hybridrl.distributed.regions import NamedShard, Region, Trace, TracedCopy
from hybridrl.distributed.torch_compat import all_gather_single
from hybridrl.reshard.copies import Buffers, Copier, CopyRect, copier_class, cut, region_view
from hybridrl.reshard.fingerprint import FingerprintSums, Hashes, salt
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transfers import SourceLayout, Transfer


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


# Number of a buffer, and a view of its tensor.
_BufferView = tuple[int, Tensor]
# What is moved, its views that are read and written, and the cells of its fingerprint.
_Move = tuple[TracedCopy | Transfer, _BufferView, _BufferView, list[tuple[int, int]]]


class PlanExecutor:
    """Executes one rank's plan. `prepare` and `move` are collectives of the shard group.

    Buffers are the shards of the plan's sources, all parameters, and the two halves of the staging
    memory, in this order.

    Args:
        plan: plan of some of the weights.
        shards: shards of all weights by name.
        destination: this rank's part of a rollout engine.
        group: the shard group.
        hashes: for fingerprints.

    Attributes:
        sums: fingerprints sent by the last `move` with fingerprints.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Mapping[str, NamedShard],
        destination: Destination,
        group: dist.ProcessGroup,
        hashes: Hashes,
    ) -> None:
        self.plan = plan
        self._shards = [shards[source.name] for source in plan.sources]
        self._sources = {source.name: (i, source) for i, source in enumerate(plan.sources)}
        self._parameters = {name: i for i, name in enumerate(destination.trace.parameters)}
        self.sums = FingerprintSums((dist.get_world_size(group), len(self._parameters)))
        self._destination = destination
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._held = [source.region(self._rank) for source in plan.sources]
        self._hashes = hashes
        self._buffers = Buffers(destination.device)
        self._halves: list[Tensor] = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Allocate staging memory and look up the addresses of all buffers."""
        destination = self._destination
        self._halves = [
            torch.empty(size, dtype=destination.dtype, device=destination.device)
            for size in self.staging_sizes()
        ]
        parameters = [destination.tensors[name] for name in self._parameters]
        if self._buffers.bind([*self._local_shards(), *parameters, *self._halves]):
            self._build_copiers()

    @torch.no_grad()
    def move(self, *, fingerprint: bool) -> None:
        """Enqueue the move; on GPUs it runs on the current stream and on the group's own."""
        destination, plan = self._destination, self.plan
        if plan.gathered:
            destination.load(
                (shard.name, self._gathered(shard, source))
                for shard, source in zip(self._shards, plan.sources, strict=True)
                if shard.name in plan.gathered
            )
        for fill in plan.fills:
            region_view(destination.tensors[fill.parameter], fill.region).fill_(fill.value)
        self._run_buckets(self.sums.values.zero_() if fingerprint else None)

    def release(self) -> None:
        """Free staging memory and drop references to the shards."""
        self._buffers.release()
        self._halves = []

    def staging_sizes(self) -> list[int]:
        """Return the elements of each half of the staging memory."""
        sizes = [bucket.size for bucket in self.plan.buckets]
        return [max(sizes[half::2], default=0) for half in (0, 1)]

    def _build_copiers(self) -> None:
        """Lower the plan to rectangles between the buffers, which are bound."""
        self._local = self._copier(
            (copy, self._shard(copy), self._parameter(copy), self._cells(copy, [self._rank]))
            for copy in self.plan.local
        )
        self._pack, self._unpack = [], []
        for number, bucket in enumerate(self.plan.buckets):
            packed: Iterable[_Move] = (
                (
                    transfer,
                    self._shard(transfer),
                    self._staging(number, start, transfer),
                    [cell for write in transfer.writes for cell in self._cells(*write)],
                )
                for start, transfer in bucket.packed
            )
            self._pack.append(self._copier(packed))
            unpacked: Iterable[_Move] = (
                (copy, self._staging(number, start, transfer), self._parameter(copy), [])
                for start, transfer in bucket.unpacked
                for copy, receivers in transfer.writes
                if self._rank in receivers
            )
            self._unpack.append(self._copier(unpacked))
        self.sums.allocate(self._destination.device)

    def _copier(self, moves: Iterable[_Move]) -> Copier:
        destination, rects = self._destination, list[CopyRect]()
        for moved, source, target, cells in moves:
            shape, key = self._sources[moved.source][1].shape, salt(moved.source)
            number = self.sums.number(cells)
            rects += cut(self._buffers, source, target, moved.region, shape, key, number)
        kind = copier_class(destination.device)
        return kind(rects, self._buffers, destination.dtype, self._hashes)

    def _cells(self, copy: TracedCopy, receivers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the cells (receiver, parameter) for which the fingerprint of a copy counts."""
        return [(receiver, self._parameters[copy.parameter]) for receiver in receivers]

    def _shard(self, moved: TracedCopy | Transfer) -> _BufferView:
        """Return a region of a whole tensor inside this rank's shard, and the shard's number."""
        number, _ = self._sources[moved.source]
        first = self._held[number].offset
        within = tuple(at - f for at, f in zip(moved.region.offset, first, strict=True))
        tensor = self._buffers.tensors[number]
        return number, region_view(tensor, Region(within, moved.region.shape))

    def _parameter(self, copy: TracedCopy) -> _BufferView:
        number = len(self._sources) + self._parameters[copy.parameter]
        return number, region_view(self._buffers.tensors[number], copy.destination)

    def _staging(self, bucket: int, start: int, transfer: Transfer) -> _BufferView:
        number = len(self._sources) + len(self._parameters) + bucket % 2
        part = self._buffers.tensors[number][start : start + transfer.region.numel]
        return number, part.view(transfer.region.shape)

    def _local_shards(self) -> list[Tensor]:
        tensors = []
        for shard, held in zip(self._shards, self._held, strict=True):
            tensor = shard.local()
            if tensor.shape != held.shape or not tensor.is_contiguous():
                raise ReshardError(
                    f"{shard.name}: this rank's shard has shape {tuple(tensor.shape)}, "
                    f"planned was {held.shape} of {shard.shape}, contiguous"
                )
            tensors.append(tensor)
        return tensors

    def _gathered(self, shard: NamedShard, source: SourceLayout) -> Tensor:
        """Gather a whole tensor, uncast."""
        position.at(f"gathering {shard.name}")
        own = shard.local().movedim(source.dim, 0)
        longest = source.region(0).shape[source.dim]
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own
        shards = own.new_empty((source.num_shards, *padded.shape))
        dist.all_gather(list(shards), padded, group=self._group)
        whole = shards.flatten(0, 1)[: source.shape[source.dim]]
        return whole.movedim(0, source.dim).contiguous()

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
            if self._destination.device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                position.mark("bucket", number + 1, count, event)

    def _start_bucket(self, number: int, sums: Tensor | None, *, paced: bool) -> list[Any]:
        """Pack a bucket and start its exchange; on GPUs both are only enqueued.

        Returns:
            Works to wait for before the bucket is unpacked.
        """
        self._pack[number].run(0, 1, sums, paced=paced)
        bucket, memory = self.plan.buckets[number], self._halves[number % 2]
        works = []
        if bucket.slot:
            slots = memory[: bucket.slot * len(self._ranks)]
            own = slots.view(len(self._ranks), -1)[self._rank]
            works.append(all_gather_single(slots, own, group=self._group, async_op=True))
        operations = [
            dist.P2POp(kind, memory[part], self._ranks[peer], self._group)
            for kind, parts in ((dist.isend, bucket.sends), (dist.irecv, bucket.receives))
            for peer, part in parts
        ]
        return works + (dist.batch_isend_irecv(operations) if operations else [])
