"""Executor of one plan: copies this rank's shards into the engine's live parameters.

    shards (float32) -> cast and copy what stays on this rank ----------------> live parameters
                     -> cast and pack -> bucket -> exchange -> bucket -> unpack ->

Buckets alternate between the two halves of the staging memory: while one is exchanged, the next is
packed into the other half.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed import position
from hybridrl.distributed.regions import NamedShard, Region, TracedCopy
from hybridrl.distributed.torch_compat import all_gather_single
from hybridrl.reshard.copies import Buffers, Copier, CopyRect, Hashes, cut, region_view, salt
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.route import Route
from hybridrl.reshard.row_scales import RowScales

# Number of a buffer, and a view of its tensor.
_BufferView = tuple[int, Tensor]
# A copy, its views that are read and written, and ranks for which its fingerprint is counted.
_Move = tuple[TracedCopy, _BufferView, _BufferView, Iterable[int]]


class ReshardError(RuntimeError):
    """Weights cannot be moved, or did not arrive as they were sent."""


def copier_class(device: torch.device) -> type[Copier]:
    """Return the class of copiers for a device."""
    if device.type == "cpu":
        return Copier
    # Triton comes with torch for GPUs only.
    from hybridrl.reshard.triton_copies import TritonCopier

    return TritonCopier


class PlanExecutor:
    """Executes one rank's plan. `prepare` and `move` are collectives of the route's members.

    Buffers are the shards of the plan's sources, all parameters, and the two halves of the staging
    memory, in this order. `shards` has those of all weights by name; `parameters`, in the trace's
    order, never move. Those that the plan writes are of its dtype, or of `dtype` if it has none.
    Where they are FP8, `scales` has those of their sources' rows.

    Fingerprints of what is sent are counted in cells, one per receiver and parameter. A transfer to
    several receivers is fingerprinted once; its sum counts for all of its cells.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Mapping[str, NamedShard],
        parameters: Mapping[str, Tensor],
        route: Route,
        hashes: Hashes,
        dtype: torch.dtype,
        scales: RowScales | None = None,
    ) -> None:
        self.plan, self.scales = plan, scales
        self._shards = [shards[source.name] for source in plan.sources]
        self._sources = {source.name: (i, source) for i, source in enumerate(plan.sources)}
        self._parameters = parameters
        self._numbers = {name: i for i, name in enumerate(parameters)}
        self._group = route.group
        self._rank = route.position
        self._ranks = route.peers
        is_whole = len(self._ranks) == dist.get_world_size(self._group)
        assert is_whole or not any(b.slot for b in plan.buckets), "others cannot gather"
        self._held = [source.region(self._rank) for source in plan.sources]
        self._hashes = hashes
        self._device = next(iter(parameters.values())).device
        self.dtype = plan.dtype or dtype
        self._buffers = Buffers(self._device)
        self._halves: list[Tensor] = []
        self._sum_of: dict[tuple[int, tuple[int, ...]], int] = {}

    @torch.no_grad()
    def prepare(self) -> None:
        """Allocate staging memory and look up the addresses of all buffers."""
        sizes = [bucket.size for bucket in self.plan.buckets]
        self._halves = [
            torch.empty(max(half, default=0), dtype=self.dtype, device=self._device)
            for half in (sizes[0::2], sizes[1::2])
        ]
        tensors = [*self._local_shards(), *self._parameters.values(), *self._halves]
        if self._buffers.bind(tensors):
            self._build_copiers()

    @torch.no_grad()
    def move(self, *, fingerprint: bool) -> None:
        """Enqueue the move; on GPUs it runs on the current stream and on the group's own."""
        for fill in self.plan.fills:
            region_view(self._parameters[fill.parameter], fill.region).fill_(fill.value)
        if self.scales is not None:
            shards = zip(self.plan.sources, self._held, self._buffers.tensors, strict=False)
            self.scales.update(shards)
        self._run_buckets(self._sums.zero_() if fingerprint else None)

    def sent(self) -> Tensor:
        """Return [receivers, parameters] int64: the sums of the last `move` with fingerprints."""
        cells = self._sums.new_zeros(len(self._ranks) * len(self._parameters))
        cells.index_add_(0, self._cells, self._sums[self._sums_of_cells])
        return cells.view(len(self._ranks), -1)

    def release(self) -> None:
        """Free staging memory and drop references to the shards."""
        self._buffers.release()
        self._halves = []

    def _build_copiers(self) -> None:
        """Lower the plan to rectangles between the buffers, which are bound."""
        self._local = self._copier(
            (copy, self._shard(copy), self._parameter(copy), [self._rank])
            for copy in self.plan.local
        )
        self._pack, self._unpack = [], []
        for number, bucket in enumerate(self.plan.buckets):
            self._pack.append(
                self._copier(
                    (copy, self._shard(copy), self._staging(number, start, copy), receivers)
                    for start, (copy, _, receivers) in bucket.packed
                )
            )
            self._unpack.append(
                self._copier(
                    (copy, self._staging(number, start, copy), self._parameter(copy), [])
                    for start, (copy, _, _) in bucket.unpacked
                )
            )
        pairs = [
            (number, receiver * len(self._parameters) + parameter)
            for (parameter, receivers), number in self._sum_of.items()
            for receiver in receivers
        ]
        index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(self._device)
        self._sums_of_cells, self._cells = index.unbind(1)
        self._sums = torch.zeros(len(self._sum_of), dtype=torch.int64, device=self._device)

    def _copier(self, moves: Iterable[_Move]) -> Copier:
        rects: list[CopyRect] = []
        for copy, source, target, receivers in moves:
            shape, key = self._sources[copy.source][1].shape, salt(copy.source)
            counted = (self._numbers[copy.parameter], tuple(receivers))
            number = self._sum_of.setdefault(counted, len(self._sum_of))
            first = 0 if self.scales is None else self.scales.first[copy.source]
            rects += cut(self._buffers, source, target, copy.region, shape, key, number, first)
        scales = None if self.scales is None else self.scales.values
        copier = copier_class(self._device)
        return copier(rects, self._buffers, self.dtype, self._hashes, scales=scales)

    def _shard(self, copy: TracedCopy) -> _BufferView:
        """Return the region that a copy reads, which is inside this rank's shard."""
        number, _ = self._sources[copy.source]
        first = self._held[number].offset
        within = tuple(at - f for at, f in zip(copy.region.offset, first, strict=True))
        tensor = self._buffers.tensors[number]
        return number, region_view(tensor, Region(within, copy.region.shape))

    def _parameter(self, copy: TracedCopy) -> _BufferView:
        number = len(self._sources) + self._numbers[copy.parameter]
        return number, region_view(self._buffers.tensors[number], copy.destination)

    def _staging(self, bucket: int, start: int, copy: TracedCopy) -> _BufferView:
        number = len(self._sources) + len(self._parameters) + bucket % 2
        part = self._buffers.tensors[number][start : start + copy.region.numel]
        return number, part.view(copy.region.shape)

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

    def _run_buckets(self, sums: Tensor | None) -> None:
        """Run all buckets; packing is one bucket ahead, so that the links never wait for it.

        Packing and unpacking run on one stream, so a half of the staging memory is free in time.
        Local copies are spread over the buckets if the exchange dominates. Otherwise they come
        first, so that the device works while the exchange is prepared.
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
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                position.mark("bucket", number + 1, count, event)

    def _start_bucket(self, number: int, sums: Tensor | None, *, paced: bool) -> list[Any]:
        """Enqueue packing and exchange of a bucket; return works to wait for before unpacking."""
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
