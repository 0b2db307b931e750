"""Batched copies of rectangles: on GPUs one kernel launch, elsewhere a loop.

CopyRects (numbers) + Buffers (current addresses) -> cast, copy and fingerprint in one pass
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybridrl.reshard.buffers import Buffers
from hybridrl.reshard.fingerprint import Hashes, fingerprint
from hybridrl.reshard.rects import CopyRect

logger = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Copier(Protocol):
    """Copies a fixed set of rectangles, any number of times."""

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one of `shares` nearly equal parts of the work.

        Args:
            share: number of the part.
            shares: number of parts.
            sums: [sums] int64, to which salted fingerprints are added; None: no fingerprints.
            paced: leave part of the device to a concurrent exchange.
        """
        ...


def build_copier(
    rects: Sequence[CopyRect],
    buffers: Buffers,
    dtype: torch.dtype,
    hashes: Hashes,
    *,
    write: bool = True,
) -> Copier:
    """Build the copier of the buffers' device.

    Args:
        rects: rectangles to copy; no two write the same element.
        buffers: the memory that the rectangles number.
        dtype: dtype of the targets, to which values are cast.
        hashes: of all rows and columns, for fingerprints.
        write: false: only read the sources, for their fingerprints.
    """
    if buffers.device.type == "cpu":
        return TorchCopier(rects, buffers, dtype, hashes, write=write)
    odd = {buffers.tensors[rect.source].dtype for rect in rects} | {dtype}
    if not odd <= set(KERNEL_DTYPES):
        logger.warning(
            "copies between %s need one launch per rectangle, %d in all: the kernel supports %s",
            sorted(map(str, odd)),
            len(rects),
            sorted(map(str, KERNEL_DTYPES)),
        )
        return TorchCopier(rects, buffers, dtype, hashes, write=write)
    # Triton comes with torch for GPUs only.
    from hybridrl.reshard.triton_copies import TritonCopier

    return TritonCopier(rects, buffers, dtype, hashes, write=write)


class TorchCopier:
    """Copier that loops over the rectangles; for arguments see `build_copier`."""

    def __init__(
        self,
        rects: Sequence[CopyRect],
        buffers: Buffers,
        dtype: torch.dtype,
        hashes: Hashes,
        *,
        write: bool,
    ) -> None:
        self._rects = rects
        self._buffers = buffers
        self._dtype = dtype
        self._hashes = hashes
        self._write = write

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one part of the work; see `Copier`."""
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
