"""Batched copies of rectangles with fingerprints, which must be equal on both sides of a reshard.

views of regions of numbered buffers -> CopyRects (numbers)
CopyRects + Buffers (current addresses) -> cast, copy and fingerprint in one pass

fingerprint(region) = salt(source) * sum over its elements of bits * row_hash(r) * column_hash(c)

modulo 2^64. bits is the element's bit pattern. c is its index in the last dim of the WHOLE source
tensor, r that in all dims before, row-major. Hashes and salts are odd, so every change of one
element is detected. They differ between indices and tensors, so swaps, shifts and mix-ups are
detected, too. The fingerprint of a region is the sum of those of its parts. Bits and column hashes
have at most 32 bits: on a GPU an element costs one multiply-add, a row's sum one product of 64.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrl.distributed.regions import FP8, Region

# Elements that are widened to int64 at a time: they fit a CPU's cache.
CHUNK_ELEMENTS = 1 << 17

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Largest number of FP8 (e4m3).
FP8_MAX = 448.0


class CopyRect(NamedTuple):
    """Rectangle that is read from one buffer and written to another, in elements.

    Attributes:
        source, source_start, source_stride: buffer, first element, distance from row to row.
        target, target_start, target_stride: the same; meaningless where nothing is written.
        rows, columns: size.
        row, column: start in the whole checkpoint tensor, viewed as rows of its last dim.
        salt: fingerprint salt of the checkpoint tensor.
        sum: number of the sum to which the salted fingerprint is added.
        scale: number of the first row's scale, if values are quantised.
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
    scale: int = 0


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
    first_scale: int = 0,
) -> Iterator[CopyRect]:
    """Yield the rectangles of a region: one, unless the region has more than two dims.

    `source` and `target` are the number of the buffer that is read or written, and the region as
    its view. The checkpoint tensor, to which `region` refers, has the shape `whole`; `first_scale`
    is the number of its first row's scale.
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
            first_scale + row,
        )


class Hashes(NamedTuple):
    """Odd hashes of all row indices, int64, and of all column indices, int32 and different."""

    rows: Tensor
    columns: Tensor


def hashes(num_rows: int, num_columns: int, device: torch.device) -> Hashes:
    """Compute the hashes of row and column indices."""
    return Hashes(row_hashes(num_rows).to(device), column_hashes(num_columns).to(device))


def row_hashes(size: int) -> Tensor:
    """Return [size] odd int64: SplitMix64 of the index, https://doi.org/10.1145/2714064.2660195."""
    x = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64)) | 1


def column_hashes(size: int) -> Tensor:
    """Return [size] odd int32: 2 p(index) + 1 for a permutation p of the 31-bit numbers.

    p multiplies by odd numbers modulo 2^31 and folds high bits into low ones; both are invertible.
    """
    mask = (1 << 31) - 1
    x = torch.arange(size, dtype=torch.int64)
    for factor in (0x2C1B3C6D, 0x297A2D39, 0x165667B1):
        x = ((x ^ (x >> 16)) * factor + 0x1B873593) & mask
    x ^= x >> 15
    return (2 * x + 1).to(torch.int32)  # wraps around: the same 32 bits


def salt(source: str) -> int:
    """Return an odd int64 for a tensor's name."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) | 1


def fingerprint(values: Tensor, row: int, column: int, hashes: Hashes) -> Tensor:
    """Compute the unsalted fingerprint of a rectangle that begins at (row, column) of its tensor.

    Reference implementation, used on CPUs; on GPUs the copy kernel computes the same. `values` are
    [rows, columns] of a dtype of at most 4 bytes. Returns a 0-dim int64.
    """
    rows = hashes.rows[row : row + values.shape[0]]
    columns = hashes.columns[column : column + values.shape[1]].to(torch.int64)
    assert len(rows) == values.shape[0] and len(columns) == values.shape[1]
    total = rows.new_zeros(())
    height = max(1, CHUNK_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, len(rows), height):
        chunk = values[start : start + height].contiguous()
        bits = chunk.view(BITS[values.dtype.itemsize]).to(torch.int64)
        total += (bits.mul_(columns).sum(1) * rows[start : start + height]).sum()
    return total


def quantised(values: Tensor, scales: Tensor) -> Tensor:
    """Return the bits of FP8 that vLLM makes of [rows, columns], given [rows] scales.

    e4m3(clamp(bfloat16(x) / scale)), with a true division, rounded to the nearest even number.
    """
    scaled = values.to(torch.bfloat16) / scales[:, None]
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(FP8)


class Copier:
    """Copies a fixed set of rectangles, any number of times; here in a loop, for CPUs.

    Args:
        rects: rectangles to copy; no two write the same element.
        buffers: the memory that the rectangles number.
        dtype: dtype of the targets, to which values are cast; for `FP8` those of other dtypes are
            quantised.
        hashes: of all rows and columns, for fingerprints.
        write: false: only read the sources, for their fingerprints.
        scales: [all rows] float32, for FP8.
    """

    def __init__(
        self,
        rects: Sequence[CopyRect],
        buffers: Buffers,
        dtype: torch.dtype,
        hashes: Hashes,
        *,
        write: bool = True,
        scales: Tensor | None = None,
    ) -> None:
        self._buffers = buffers
        self._dtype = dtype
        self._hashes = hashes
        self._write = write
        self._scales = scales
        self._prepare(rects)

    def _prepare(self, rects: Sequence[CopyRect]) -> None:
        self._rects = rects

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do part `share` of `shares` nearly equal ones.

        Salted fingerprints are added to `sums`, [sums] int64, if given. `paced` leaves part of the
        device to a concurrent exchange.
        """
        buffers, count = self._buffers, len(self._rects)
        for rect in self._rects[count * share // shares : count * (share + 1) // shares]:
            size = (rect.rows, rect.columns)
            source = buffers.view(rect.source, rect.source_start, size, rect.source_stride)
            if self._dtype is FP8 and source.dtype is not FP8:
                assert self._scales is not None, "FP8 needs scales"
                values = quantised(source, self._scales[rect.scale : rect.scale + rect.rows])
            else:
                values = source.to(self._dtype)
            if self._write:
                target = buffers.view(rect.target, rect.target_start, size, rect.target_stride)
                target.copy_(values)
            if sums is not None:
                sums[rect.sum] += (
                    fingerprint(values, rect.row, rect.column, self._hashes) * rect.salt
                )
