"""Numbered buffers that copies read and write, and regions of tensors inside them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BufferRegion(NamedTuple):
    """Region of a contiguous tensor that is part of a buffer.

    Attributes:
        buffer: number of the buffer.
        start: element of the buffer at which the tensor begins.
        shape: shape of the tensor.
        offset: offset of the region in the tensor.
    """

    buffer: int
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Buffers:
    """Contiguous tensors by number; their addresses may change between two reshards.

    Args:
        device: device of the tensors.

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
