"""Staging memory, and the exchange of what lies in it.

A bucket's half of the staging memory holds what this rank sends, packed once however many ranks
take it, and then what it receives. Buckets take the two halves in turn: while one is on its way,
the next is packed into the other half, as soon as what had been received there is unpacked.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.reshard.layout import SourceLayout
from hybridrl.reshard.messages import Bucket, Message, Section


class Staging:
    """Memory for two buckets and the point-to-point transfers between ranks.

    Args:
        buckets: this rank's part of them.
        group: the ranks that the buckets number.
        dtype, device: of what is moved.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._dtype = dtype
        self._device = device
        sizes = [bucket.send_size + bucket.receive_size for bucket in buckets]
        self._sizes = [max(sizes[half::2], default=0) for half in (0, 1)]
        self.halves: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return sum(self._sizes) * self._dtype.itemsize

    def allocate(self) -> None:
        """Take the memory."""
        self.halves = [
            torch.empty(size, dtype=self._dtype, device=self._device) for size in self._sizes
        ]

    def free(self) -> None:
        """Let go of the memory."""
        self.halves = []

    def start(self, number: int) -> list[Any]:
        """Send what was packed for a bucket and receive the rest; on GPUs only enqueued.

        Returns:
            What to wait for before the bucket is unpacked.
        """
        bucket, memory = self._buckets[number], self.halves[number % 2]
        operations = []
        for start, section in placed(bucket.sends, 0):
            packed = memory[start : start + section.size]
            for receiver in section.receivers:
                operations.append(self._operation(dist.isend, packed, receiver))
        for start, section in placed(bucket.receives, bucket.send_size):
            operations.append(
                self._operation(dist.irecv, memory[start : start + section.size], section.sender)
            )
        return dist.batch_isend_irecv(operations) if operations else []

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[peer], self._group)


def placed(sections: Sequence[Section], start: int) -> Iterator[tuple[int, Section]]:
    """Each section with its place in staging memory, if the first begins at `start`."""
    for section in sections:
        yield start, section
        start += section.size


def packed(bucket: Bucket) -> Iterator[tuple[int, Message]]:
    """Each message that this rank sends, with its place in staging memory."""
    for start, section in placed(bucket.sends, 0):
        yield from section.places(start)


def unpacked(bucket: Bucket) -> Iterator[tuple[int, Message]]:
    """Each message that this rank receives, with its place in staging memory."""
    for start, section in placed(bucket.receives, bucket.send_size):
        yield from section.places(start)


def gather(shard: Tensor, source: SourceLayout, group: dist.ProcessGroup) -> Tensor:
    """The whole of a tensor, uncast, from the shards of a group."""
    own = shard.movedim(source.dim, 0)
    padded = own.new_zeros((source.size_per_shard, *own.shape[1:]))
    padded[: len(own)] = own
    shards = own.new_empty((source.num_shards, *padded.shape))
    dist.all_gather(list(shards), padded, group=group)
    whole = shards.flatten(0, 1)[: source.shape[source.dim]]
    return whole.movedim(0, source.dim).contiguous()
