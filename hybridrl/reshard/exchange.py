"""Staging memory, and the exchange of what lies in it.

What a rank sends is packed once, however many ranks take it. Buckets take the two halves of the
memory in turn: while one is on its way, the next is packed into the other half, as soon as what
had been received there is unpacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.reshard.layout import SourceLayout
from hybridrl.reshard.messages import Bucket

try:
    from torch.distributed import all_gather_single
except ImportError:  # the name before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single


class Staging:
    """Memory for two buckets, and the transfers between ranks.

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
        sizes = [bucket.size for bucket in buckets]
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
        """Send or gather what was packed for a bucket; on GPUs only enqueued.

        Returns:
            What to wait for before the bucket is unpacked.
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
    """The whole of a tensor, uncast, from the shards of a group."""
    own = shard.movedim(source.dim, 0)
    padded = own.new_zeros((source.size_per_shard, *own.shape[1:]))
    padded[: len(own)] = own
    shards = own.new_empty((source.num_shards, *padded.shape))
    dist.all_gather(list(shards), padded, group=group)
    whole = shards.flatten(0, 1)[: source.shape[source.dim]]
    return whole.movedim(0, source.dim).contiguous()
