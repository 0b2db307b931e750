"""Scales of FP8 weights, one a row of a checkpoint tensor.

shards -> max |row| -> all-reduce -> scales -> copy kernels, and the engine's own tensors

A row may be spread over ranks, and over the slices of an engine. Its scale is that of the whole
row: in vLLM, too, ranks of a row-parallel layer reduce their maxima.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.regions import Region, Trace
from hybridrl.reshard.copies import FP8_MAX, region_view
from hybridrl.reshard.transfers import SourceLayout

# vLLM's smallest scale.
LEAST = 1 / (FP8_MAX * 512)


class RowScales:
    """Scales of the rows of one plan's sources. `update` is a collective of the route's group.

    Args:
        sources: those of the plan.
        trace, tensors: this rank's engine, with its tensors of scales.
        group: of all ranks with shards or with an engine.
        device: of the scales.

    Attributes:
        first: number of the first row of each source.
        values: [rows] float32; never moves.
    """

    def __init__(
        self,
        sources: Sequence[SourceLayout],
        trace: Trace,
        tensors: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group = group
        self.first: dict[str, int] = {}
        numbers: dict[str, Tensor] = {}
        end = 0
        for source in sources:
            size = math.prod(source.shape[:-1])
            numbers[source.name] = torch.arange(end, end + size).view(source.shape[:-1])
            self.first[source.name] = end
            end += size
        self.values = torch.ones(end, dtype=torch.float32, device=device)
        rows: dict[str, Tensor] = {}
        for copy in trace.copies:
            if copy.parameter in trace.scales and copy.source in numbers:
                if copy.parameter not in rows:
                    rows[copy.parameter] = torch.full(trace.parameters[copy.parameter][:-1], -1)
                own = region_view(numbers[copy.source], _without_columns(copy.region))
                region_view(rows[copy.parameter], _without_columns(copy.destination)).copy_(own)
        assert all((of_layer >= 0).all() for of_layer in rows.values()), "rows without a scale"
        self._live = [tensors[trace.scales[name]].view(-1) for name in rows]
        self._sizes = [len(scales) for scales in self._live]
        order = {name: number for number, name in enumerate(trace.parameters)}
        self._numbers = torch.tensor([order[name] for name in rows], device=device).long()
        self._ends = torch.tensor([0, *self._sizes], device=device).cumsum(0)
        every = [of_layer.flatten() for of_layer in rows.values()]
        self._index = torch.cat([torch.empty(0, dtype=torch.int64), *every]).to(device, torch.int32)

    @torch.no_grad()
    def update(self, shards: Iterable[tuple[SourceLayout, Region, Tensor]]) -> None:
        """Compute all scales from sources, with this rank's shards; write the engine's."""
        self.values.zero_()
        for source, held, shard in shards:
            if held.numel:
                shape, first = source.shape[:-1], self.first[source.name]
                rows = self.values[first : first + math.prod(shape)].view(shape)
                # The largest of rounded numbers is the largest, rounded.
                largest = torch.linalg.vector_norm(shard, math.inf, dim=-1)
                region_view(rows, _without_columns(held)).copy_(largest.to(torch.bfloat16))
        # A maximum over ranks may lose NaN; an infinite scale arrives, and so does the fault.
        self.values.nan_to_num_(nan=math.inf, posinf=math.inf)
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(self.values, op=dist.ReduceOp.MAX, group=self._group)
        # By a tensor: a number would multiply by its inverse, which rounds otherwise.
        self.values.div_(torch.full_like(self.values[:1], FP8_MAX)).clamp_(min=LEAST)
        if self._live:
            torch._foreach_copy_(self._live, list(self._expected().split(self._sizes)))

    def add_sums(self, present: Tensor, expected: Tensor) -> None:
        """Add checksums of the engine's scales to those of its parameters, [parameters] int64.

        To `present` of those that it holds, to `expected` of those that it should hold.
        """
        if self._live:
            present.index_add_(0, self._numbers, self._sums(torch.cat(self._live)))
            expected.index_add_(0, self._numbers, self._sums(self._expected()))

    def _expected(self) -> Tensor:
        return self.values.index_select(0, self._index)

    def _sums(self, scales: Tensor) -> Tensor:
        """Return [layers] int64: sums of bits times odd numbers, modulo 2^64."""
        odd = torch.arange(1, 2 * len(scales), 2, device=scales.device)
        ends = torch.nn.functional.pad((scales.view(torch.int32) * odd).cumsum(0), (1, 0))
        return ends[self._ends].diff()


def _without_columns(region: Region) -> Region:
    return Region(region.offset[:-1], region.shape[:-1])
