"""Pinned host copy of this rank's shards; training blocks only while it is filled.

stage(tensors)     device -> host, one copy after the other; the memory is reused by each save
contents(shard)    the bytes, for the writer
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from threading import Thread
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl.distributed import position
from hybridrl.distributed.offload import HostBuffer, aligned
from hybridrl.distributed.torch_compat import compute_local_shape_and_global_offset

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def in_thread(name: str, function: Callable[[], _T]) -> Future[_T]:
    """Run a function in a thread, for which the process does not wait at its end."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised by `result`
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return result


class StagedShard(NamedTuple):
    """Shard of a tensor in the staging buffer.

    `size` is that of the whole tensor, `offsets` are those of the shard in it, `start` is its first
    byte in the buffer.
    """

    size: torch.Size
    offsets: torch.Size
    shape: torch.Size
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.shape) * self.dtype.itemsize


class Staging:
    """Staging buffer for one copy of a state, page-locked if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = HostBuffer(pinned=device.type == "cuda")
        self._prepared: Future[None] | None = None
        self.shards: dict[str, StagedShard] = {}
        self._end = 0

    def prepare(self, num_bytes: int) -> None:
        """Allocate memory in a thread that `stage` waits for: pinning takes a second per GB."""

        def grow() -> None:
            start = time.perf_counter()
            with torch.cuda.device(self._device) if self._is_cuda else nullcontext():
                self._host.grow(num_bytes)
            seconds = time.perf_counter() - start
            logger.info("%.2f GiB of host memory in %.1f s", num_bytes / 2**30, seconds)

        self._prepared = in_thread("prepare staging", grow)

    def clear(self) -> None:
        """Drop all staged shards; the memory stays."""
        self.shards, self._end = {}, 0

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Add copies of tensors, of DTensors their local parts, and wait for the copies.

        A plain tensor is the same on all ranks with its key. Contents must be on the device.
        """
        if self._prepared is not None:
            self._prepared.result()
        added: list[tuple[Tensor, StagedShard]] = []
        for key, tensor in tensors.items():
            assert key not in self.shards, key
            local, shard = _shard(tensor, self._end)
            self.shards[key] = shard
            self._end += aligned(shard.num_bytes)
            added.append((local, shard))
        self._host.grow(self._end)
        for number, (local, shard) in enumerate(added, 1):
            position.at("staged tensor", number, len(added))
            content = local.contiguous().view(-1).view(torch.uint8)
            for on_device, on_host in self._host.pairs(content, shard.start):
                on_host.copy_(on_device, non_blocking=True)
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def num_bytes(self) -> int:
        """Bytes of all staged shards."""
        return sum(shard.num_bytes for shard in self.shards.values())

    def contents(self, shard: StagedShard) -> Iterator[memoryview]:
        """Yield a shard's bytes in order, piece by piece."""
        for piece in self._host.slices(shard.start, shard.num_bytes):
            yield memoryview(piece.numpy())

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"


def _shard(tensor: Tensor, start: int) -> tuple[Tensor, StagedShard]:
    """Return the local part of a tensor and its place."""
    if not isinstance(tensor, DTensor):
        begin = torch.Size([0] * tensor.ndim)
        return tensor, StagedShard(tensor.shape, begin, tensor.shape, tensor.dtype, start)
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    assert local.shape == torch.Size(shape), (local.shape, shape)
    shard = StagedShard(tensor.shape, torch.Size(offsets), torch.Size(shape), tensor.dtype, start)
    return local, shard
