"""Offload: tensors on the device while in use, otherwise in pinned host memory.

`fsdp.offload` is one schedule for every role. With idle_optimizer AdamW's moments are on the device
only during that role's update. With idle_all the weights of idle roles are offloaded, too.

A tensor keeps its storage object; while its content is on the host, that storage has size 0. The
tensor and its views (in FSDP2, AdamW, a reshard) are valid again after `onload`, perhaps at another
address.

    onload    allocate; copy host -> device on a side stream       wait   the compute stream waits
    offload   copy device -> host on the side stream; the allocator reuses the memory once that
              copy is done, so the copy overlaps with later compute
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hybridrl.config.choices import Offload
from hybridrl.distributed.torch_compat import local_tensor

# The pinned allocator rounds every request up to a power of two: pieces that are powers of two
# lose nothing, and the largest size bounds a single allocation of a growing buffer.
LARGEST_PIECE, SMALLEST_PIECE = 1 << 28, 1 << 20
ALIGNMENT = 512


class Offloadable:
    """Tensors that move to host memory and back together.

    The host memory is allocated at the first `offload` and kept, page-locked if the device is a
    GPU. Calls must come from the stream that uses the tensors.

    Args:
        tensors: returns the current tensors, always in the same order; of DTensors the local parts
            move. Several may share a storage.
        moves: false: the schedule keeps them on the device, and every method does nothing.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, moves: bool
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._moves = moves
        self._stream = torch.cuda.Stream(device) if moves and device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None
        self._host = HostBuffer(pinned=device.type == "cuda")
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def onload(self) -> None:
        """Start the copies back to the device; before use, call `wait`."""
        if not self._away:
            return
        for storage, size in self._away:
            storage.resize_(size)
        with self._after_compute():
            for on_device, on_host in self._pairs(self._away):
                on_device.copy_(on_host, non_blocking=True)
        if self._stream is not None:
            self._arrival = self._stream.record_event()
        self._away = []

    def wait(self) -> None:
        """Make the current stream wait for `onload`, which is called if necessary."""
        self.onload()
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
            self._arrival = None

    def offload(self) -> None:
        """Copy the tensors to the host and release their device memory, asynchronously."""
        if not self._moves or self._away:
            return
        self.wait()
        storages = _storages(self._tensors())
        self._host.grow(sum(aligned(size) for _, size in storages))
        with self._after_compute():
            for on_device, on_host in self._pairs(storages):
                on_host.copy_(on_device, non_blocking=True)
                if self._stream is not None:
                    on_device.record_stream(self._stream)
        for storage, _ in storages:
            storage.resize_(0)
        self._away = storages

    def _after_compute(self) -> AbstractContextManager[object]:
        """Enter the side stream, after the work that is enqueued on the current stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _pairs(
        self, storages: Iterable[tuple[torch.UntypedStorage, int]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes on the device and their place on the host, piece by piece."""
        start = 0
        for storage, size in storages:
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device)
            on_device.set_(storage, 0, (size,), (1,))  # type: ignore[call-overload]
            yield from self._host.pairs(on_device, start)
            start += aligned(size)


class HostBuffer:
    """Growing host memory, in pieces whose sizes are powers of two; pinned for copies of a GPU."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[Tensor] = []

    def grow(self, size: int) -> None:
        """Grow to at least `size` bytes; the content stays."""
        missing = size - sum(map(len, self._pieces))
        piece = LARGEST_PIECE
        while missing > 0:
            while piece > SMALLEST_PIECE and piece > missing:
                piece //= 2
            self._pieces.append(torch.empty(piece, dtype=torch.uint8, pin_memory=self._pinned))
            missing -= piece

    def slices(self, start: int, size: int) -> Iterator[Tensor]:
        """Yield bytes [start, start + size) as views of the pieces."""
        for piece in self._pieces:
            if size > 0 and start < len(piece):
                view = piece[start : start + size]
                yield view
                size -= len(view)
            start = max(start - len(piece), 0)
        assert size == 0, "the host buffer is too small"

    def pairs(self, content: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes of `content` with their place, if it is to begin at byte `start`."""
        done = 0
        for place in self.slices(start, len(content)):
            yield content[done : done + len(place)], place
            done += len(place)


def offloadable_weights(root: nn.Module, schedule: Offload, device: torch.device) -> Offloadable:
    """Make a role's sharded weights offloadable; idle weights are offloaded under idle_all.

    A forward of the root onloads them, before FSDP2 gathers them.
    """
    parameters = list(root.parameters())
    weights = Offloadable(lambda: parameters, device, moves=schedule is Offload.idle_all)
    if schedule is Offload.idle_all:
        root.register_forward_pre_hook(lambda module, args: weights.wait(), prepend=True)
    return weights


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return each storage of the tensors once, and its bytes."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    once = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
    return [(storage, storage.nbytes()) for storage in once.values()]


def aligned(size: int) -> int:
    """Round a number of bytes up: copies from and to unaligned addresses are slow."""
    return -(-size // ALIGNMENT) * ALIGNMENT
