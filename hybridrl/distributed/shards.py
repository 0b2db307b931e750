"""Source of weights: named tensors of which this rank holds a shard.

Plain data, so that a reshard does not depend on the trainer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class ShardKind(Enum):
    """Kind of a shard: a view of storage whose content changes during training, or never."""

    live = "live"
    frozen = "frozen"


@dataclass(frozen=True)
class NamedShard:
    """Checkpoint tensor, cut along one dim over the dp_shard axis.

    Shard s belongs to rank s of the dp_shard group. Along dim 0 the cut is `torch.chunk`'s
    (FSDP2's Shard(0)): shard s of n holds rows [s * ceil(rows / n), (s + 1) * ceil(rows / n)),
    clipped to the tensor, perhaps none. Dim 1 is cut only where n divides it.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint. Tied tensors appear under each name.
        shape: shape of the whole tensor.
        local: returns this rank's current shard: contiguous, float32, without FSDP2's padding.
        dim: the dim that is cut, 0 or 1.
        kind: live or frozen.
    """

    name: str
    shape: tuple[int, ...]
    local: Callable[[], Tensor]
    dim: int = 0
    kind: ShardKind = ShardKind.live
