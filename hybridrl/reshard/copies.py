"""Carries out many small copies at once: on GPUs in one kernel launch, elsewhere in a loop.

pieces (numbers) + buffers (where they lie now) -> cast, copy, and fingerprint on the way
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridrl.reshard.fingerprint import Hashes, fingerprint
from hybridrl.reshard.pieces import Piece

logger = logging.getLogger(__name__)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Buffers:
    """Contiguous tensors by number, which may come to lie elsewhere between two reshards.

    Args:
        device: of the tensors.

    Attributes:
        tensors: contiguous; none between `release` and `place`.
        addresses: [buffers] int64 on the device: what kernels read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        self._known: tuple[list[int], list[torch.dtype]] = [], []
        self._kinds: list[tuple[torch.dtype, int]] = []

    def place(self, tensors: Sequence[Tensor]) -> bool:
        """Take these from now on; return whether copies must be built anew for them.

        They must if dtypes, or addresses modulo the width of a vector access, have changed.
        """
        self.tensors = list(tensors)
        # Called before every reshard, mostly with nothing new: no work for each tensor but this.
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
        """Keep no tensor alive; their owners may free or move them."""
        self.tensors = []

    def view(self, buffer: int, start: int, size: tuple[int, int], stride: int) -> Tensor:
        """[rows, columns] of a buffer, whose rows begin `stride` elements apart."""
        tensor = self.tensors[buffer]
        return tensor.as_strided(size, (stride, 1), tensor.storage_offset() + start)


@dataclass(frozen=True)
class Job:
    """Many pieces that are read, cast to one dtype, and written.

    Attributes:
        pieces: what to copy; no two write the same element.
        buffers: where they lie.
        dtype: to which values are cast; that of the targets.
        hashes: for fingerprints.
        write: false: only read the sources, for their fingerprints.
    """

    pieces: Sequence[Piece]
    buffers: Buffers
    dtype: torch.dtype
    hashes: Hashes
    write: bool


class Copies(Protocol):
    """What does a job, any number of times."""

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one of `shares` nearly equal parts of the work.

        Args:
            share: which part.
            shares: how many parts there are.
            sums: [sums] int64, to which salted fingerprints are added; None: leave them out.
            paced: leave part of the device to an exchange that runs at the same time.
        """
        ...


def build_copies(job: Job) -> Copies:
    """What the device does a job with."""
    if job.buffers.device.type == "cpu":
        return TorchCopies(job)
    odd = {job.buffers.tensors[piece.source].dtype for piece in job.pieces} | {job.dtype}
    if not odd <= set(KERNEL_DTYPES):
        logger.warning(
            "copies between %s take a launch per piece, %d in all: the kernel knows %s",
            sorted(map(str, odd)),
            len(job.pieces),
            sorted(map(str, KERNEL_DTYPES)),
        )
        return TorchCopies(job)
    # Triton comes with torch for GPUs only.
    from hybridrl.reshard.triton_copies import TritonCopies

    return TritonCopies(job)


class TorchCopies:
    """A loop over the pieces."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one part of the work; see `Copies`."""
        job, count = self._job, len(self._job.pieces)
        for piece in job.pieces[count * share // shares : count * (share + 1) // shares]:
            size = (piece.rows, piece.columns)
            values = job.buffers.view(
                piece.source, piece.source_start, size, piece.source_stride
            ).to(job.dtype)
            if job.write:
                job.buffers.view(piece.target, piece.target_start, size, piece.target_stride).copy_(
                    values
                )
            if sums is not None:
                sums[piece.sum] += (
                    fingerprint(values, piece.row, piece.column, job.hashes) * piece.salt
                )
