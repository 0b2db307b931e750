"""Staging memory and the exchange of its buckets.

Transfers are packed once for all receivers. Buckets alternate between the two halves of the
memory: while one is exchanged, the next is packed into the other half, once that is unpacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.torch_compat import all_gather_single
from hybridrl.reshard.buckets import Bucket
from hybridrl.reshard.source_layout import SourceLayout


class BucketExchange:
    """Staging buffer for two buckets, and their exchange between ranks.

    Args:
        buckets: this rank's part of each bucket.
        group: process group of the ranks in the buckets.
        dtype, device: dtype and device of the moved weights.
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
        sizes = [bucket.size for bucket in buckets]
        self._sizes = [max(sizes[half::2], default=0) for half in (0, 1)]
        self.halves: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return sum(self._sizes) * self._dtype.itemsize

    def allocate(self) -> None:
        """Allocate both halves."""
        self.halves = [
            torch.empty(size, dtype=self._dtype, device=self._device) for size in self._sizes
        ]

    def free(self) -> None:
        """Free both halves."""
        self.halves = []

    def start(self, number: int) -> list[Any]:
        """Start the exchange of a packed bucket; on GPUs it is only enqueued.

        Returns:
            Works to wait for before the bucket is unpacked.
        """
        bucket, memory = self._buckets[number], self.halves[number % 2]
        works = []
        if bucket.slot:
            slots = memory[: bucket.slot * len(self._ranks)]
            own = slots.view(len(self._ranks), -1)[dist.get_rank(self._group)]
            works.append(all_gather_single(slots, own, group=self._group, async_op=True))
        operations = [self._operation(dist.isend, memory[part], to) for to, part in bucket.sends]
        operations += [
            self._operation(dist.irecv, memory[part], sender) for sender, part in bucket.receives
        ]
        return works + (dist.batch_isend_irecv(operations) if operations else [])

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[peer], self._group)


def gather(shard: Tensor, source: SourceLayout, group: dist.ProcessGroup) -> Tensor:
    """Gather a whole tensor, uncast, from the shards of a group."""
    own = shard.movedim(source.dim, 0)
    padded = own.new_zeros((source.size_per_shard, *own.shape[1:]))
    padded[: len(own)] = own
    shards = own.new_empty((source.num_shards, *padded.shape))
    dist.all_gather(list(shards), padded, group=group)
    whole = shards.flatten(0, 1)[: source.shape[source.dim]]
    return whole.movedim(0, source.dim).contiguous()
