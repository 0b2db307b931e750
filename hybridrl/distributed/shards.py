"""A source of weights: named tensors of which this rank holds a shard.

Plain data, so that whoever plans a reshard need not know who trains the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class ShardKind(Enum):
    """What a shard's getter returns.

    live: a view of live storage, whose content changes as training goes on.
    frozen: a view of storage whose content never changes.
    """

    live = "live"
    frozen = "frozen"


@dataclass(frozen=True)
class NamedShard:
    """One tensor of a checkpoint, cut along one dim over the dp_shard axis.

    Shard s belongs to rank s of the dp_shard group. Along dim 0 the cut is `torch.chunk`'s
    (FSDP2's Shard(0)): shard s of n holds rows [s * ceil(rows / n), (s + 1) * ceil(rows / n)),
    clipped to the tensor, perhaps none. Dim 1 is cut only where n divides it.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint. Tied tensors appear under each name.
        shape: the whole tensor's.
        local: this rank's shard as it is when called: contiguous, float32, without FSDP2's
            padding; for a DTensor, its `to_local()`.
        dim: which dim is cut, 0 or 1.
        kind: whether its content changes.
    """

    name: str
    shape: tuple[int, ...]
    local: Callable[[], Tensor]
    dim: int = 0
    kind: ShardKind = ShardKind.live
