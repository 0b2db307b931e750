"""Batched copies of rectangles: on GPUs one kernel launch, elsewhere a loop.

views of regions of numbered buffers -> CopyRects (numbers)
CopyRects + Buffers (current addresses) -> cast, copy and fingerprint in one pass
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.distributed.regions import Region
from hybridrl.reshard.fingerprint import Hashes, fingerprint


class CopyRect(NamedTuple):
    """Rectangle that is read from one buffer and written to another, in elements.

    Attributes:
        source, source_start, source_stride: buffer, first element, distance from row to row.
        target, target_start, target_stride: the same; meaningless where nothing is written.
        rows, columns: size.
        row, column: start in the whole checkpoint tensor, viewed as rows of its last dim.
        salt: fingerprint salt of the checkpoint tensor.
        sum: number of the sum to which the salted fingerprint is added.
    """

    source: int
    source_start: int
    source_stride: int
    target: int
    target_start: int
    target_stride: int
    rows: int
    columns: int
    row: int
    column: int
    salt: int
    sum: int


class Buffers:
    """Contiguous tensors by number; their addresses may change between two reshards.

    Attributes:
        tensors: contiguous; empty between `release` and `bind`.
        addresses: [buffers] int64 on the device, read by kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self._known: tuple[list[int], list[torch.dtype]] = [], []
        self._kinds: list[tuple[torch.dtype, int]] = []

    def bind(self, tensors: Sequence[Tensor]) -> bool:
        """Use these tensors from now on; return whether copiers must be rebuilt.

        They must if dtypes, or addresses modulo the width of a vector access, have changed.
        """
        self.tensors = list(tensors)
        # Called before every reshard, mostly without a change: no more work per tensor than this.
        addresses = [tensor.data_ptr() for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        if (addresses, dtypes) == self._known:
            return False
        assert all(at or not t.numel() for t, at in zip(tensors, addresses, strict=True)), (
            "a tensor to copy has no memory now"
        )
        self._known = addresses, dtypes
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        kinds = [(dtype, at % 16) for dtype, at in zip(dtypes, addresses, strict=True)]
        before, self._kinds = self._kinds, kinds
        return before != kinds

    def release(self) -> None:
        """Drop all references to the tensors; their owners may free or move them."""
        self.tensors = []

    def view(self, buffer: int, start: int, size: tuple[int, int], stride: int) -> Tensor:
        """Return a [rows, columns] view of a buffer; rows begin `stride` elements apart."""
        tensor = self.tensors[buffer]
        return tensor.as_strided(size, (stride, 1), tensor.storage_offset() + start)


def region_view(tensor: Tensor, region: Region) -> Tensor:
    """Return a region of a tensor, as a view."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]


def cut(
    buffers: Buffers,
    source: tuple[int, Tensor],
    target: tuple[int, Tensor],
    region: Region,
    whole: tuple[int, ...],
    salt: int,
    sum: int,
) -> Iterator[CopyRect]:
    """Yield the rectangles of a region: one, unless the region has more than two dims.

    Args:
        buffers: the buffers, bound.
        source, target: number of the buffer that is read or written, and the region as its view.
        region: region of the checkpoint tensor.
        whole: shape of the checkpoint tensor.
        salt, sum: see `CopyRect`.
    """
    if not region.numel:
        return
    rows, columns = (1, *region.shape)[-2:]
    within = region_view(torch.empty(whole, device="meta"), region)

    def begin(buffer: int, view: Tensor) -> tuple[int, int, int]:
        start = view.storage_offset() - buffers.tensors[buffer].storage_offset()
        return buffer, start, view.stride(-2) if rows > 1 else 0

    for index in itertools.product(*(range(size) for size in region.shape[:-2])):
        row, column = divmod(within[index].storage_offset(), whole[-1])
        yield CopyRect(
            *begin(source[0], source[1][index]),
            *begin(target[0], target[1][index]),
            rows,
            columns,
            row,
            column,
            salt,
            sum,
        )


class Copier:
    """Copies a fixed set of rectangles, any number of times; here in a loop, for CPUs.

    Args:
        rects: rectangles to copy; no two write the same element.
        buffers: the memory that the rectangles number.
        dtype: dtype of the targets, to which values are cast.
        hashes: of all rows and columns, for fingerprints.
        write: false: only read the sources, for their fingerprints.
    """

    def __init__(
        self,
        rects: Sequence[CopyRect],
        buffers: Buffers,
        dtype: torch.dtype,
        hashes: Hashes,
        *,
        write: bool = True,
    ) -> None:
        self._buffers = buffers
        self._dtype = dtype
        self._hashes = hashes
        self._write = write
        self._prepare(rects)

    def _prepare(self, rects: Sequence[CopyRect]) -> None:
        self._rects = rects

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one of `shares` nearly equal parts of the work.

        Args:
            share: number of the part.
            shares: number of parts.
            sums: [sums] int64, to which salted fingerprints are added; None: no fingerprints.
            paced: leave part of the device to a concurrent exchange.
        """
        buffers, count = self._buffers, len(self._rects)
        for rect in self._rects[count * share // shares : count * (share + 1) // shares]:
            size = (rect.rows, rect.columns)
            source = buffers.view(rect.source, rect.source_start, size, rect.source_stride)
            values = source.to(self._dtype)
            if self._write:
                target = buffers.view(rect.target, rect.target_start, size, rect.target_stride)
                target.copy_(values)
            if sums is not None:
                sums[rect.sum] += (
                    fingerprint(values, rect.row, rect.column, self._hashes) * rect.salt
                )


def copier_class(device: torch.device) -> type[Copier]:
    """Return the class of copiers for a device."""
    if device.type == "cpu":
        return Copier
    # Triton comes with torch for GPUs only.
    from hybridrl.reshard.triton_copies import TritonCopier

    return TritonCopier
