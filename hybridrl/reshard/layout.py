"""Who holds what of the weights: FSDP2's shards as regions of whole tensors."""

from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.distributed.regions import Region
from hybridrl.distributed.shards import NamedShard


class SourceLayout(NamedTuple):
    """One checkpoint tensor, cut along dim 0 over the ranks of a shard group.

    FSDP2 cuts like torch.chunk: every shard but the last ones has ceil(rows / num_shards) rows,
    and the last ones have fewer, or none.
    """

    name: str
    shape: tuple[int, ...]
    num_shards: int

    @property
    def rows_per_shard(self) -> int:
        """Rows of the first shard, which is never shorter than another."""
        return -(-self.shape[0] // self.num_shards)

    def region(self, shard: int) -> Region:
        """What shard number `shard` holds."""
        start = min(shard * self.rows_per_shard, self.shape[0])
        stop = min(start + self.rows_per_shard, self.shape[0])
        rest = self.shape[1:]
        return Region((start, *(0 for _ in rest)), (stop - start, *rest))


def layouts_of(shards: Sequence[NamedShard], num_shards: int) -> list[SourceLayout]:
    """The layout of every tensor of a provider, in the provider's order.

    Raises:
        ValueError: a tensor has no dim to cut, or two have one name.
    """
    scalars = [shard.name for shard in shards if not shard.shape]
    names = [shard.name for shard in shards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if scalars or twice:
        raise ValueError(f"cannot reshard 0-dim tensors {scalars} or tensors named twice {twice}")
    return [SourceLayout(shard.name, tuple(shard.shape), num_shards) for shard in shards]


def shard_group(rank: int, dp_shard: int) -> list[int]:
    """The ranks among which `rank`'s copy of the weights is split, row-major over dp_replicate."""
    first = rank - rank % dp_shard
    return list(range(first, first + dp_shard))


def intersect(one: Region, other: Region) -> Region | None:
    """What two regions of one tensor share, or None."""
    start = tuple(max(a, b) for a, b in zip(one.offset, other.offset, strict=True))
    stop = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    if any(b <= a for a, b in zip(start, stop, strict=True)):
        return None
    return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))
