"""Layout of the trainer's weights: FSDP2 shards as regions of whole tensors."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.distributed.regions import Region
from hybridrl.distributed.shards import NamedShard


class SourceLayout(NamedTuple):
    """Checkpoint tensor, cut along one dim over the ranks of a shard group.

    FSDP2 cuts like torch.chunk: every shard but the last ones is ceil(size / num_shards) long,
    and the last ones are shorter, or empty. Dim 1 is cut only where num_shards divides it.
    """

    name: str
    shape: tuple[int, ...]
    num_shards: int
    dim: int = 0

    @property
    def size_per_shard(self) -> int:
        """Length along `dim` of the first shard, which is the longest."""
        return -(-self.shape[self.dim] // self.num_shards)

    def region(self, shard: int) -> Region:
        """Return the region that shard number `shard` holds."""
        size = self.shape[self.dim]
        start = min(shard * self.size_per_shard, size)
        stop = min(start + self.size_per_shard, size)
        offset, shape = [0] * len(self.shape), list(self.shape)
        offset[self.dim], shape[self.dim] = start, stop - start
        return Region(tuple(offset), tuple(shape))


def layouts_of(shards: Sequence[NamedShard], num_shards: int) -> list[SourceLayout]:
    """Return the layout of every tensor, in the order of the shards.

    Raises:
        ValueError: a tensor has no dim to cut, two have one name, or dim 1 does not divide.
    """
    scalars = [shard.name for shard in shards if not shard.shape]
    names = [shard.name for shard in shards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if scalars or twice:
        raise ValueError(f"cannot reshard 0-dim tensors {scalars} or tensors named twice {twice}")
    uneven = [shard.name for shard in shards if shard.dim and shard.shape[shard.dim] % num_shards]
    if uneven:
        raise ValueError(f"dim 1 of {uneven} does not divide into {num_shards} shards")
    return [SourceLayout(shard.name, tuple(shard.shape), num_shards, shard.dim) for shard in shards]


def intersect(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions of one tensor, or None."""
    start = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    if any(b <= a for a, b in zip(start, stop, strict=True)):
        return None
    return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def largest_index(sources: Sequence[SourceLayout]) -> tuple[int, int]:
    """Return the most rows and the most columns of any source, viewed as rows of its last dim."""
    rows = max(1, *(math.prod(source.shape[:-1]) for source in sources))
    return rows, max(source.shape[-1] for source in sources)
