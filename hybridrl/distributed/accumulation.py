"""Where the gradients of an optimizer step's micro-batches add up.

FSDP2 would reduce-scatter after every backward. A sum over micro-batches can as well be reduced
once, if every rank has room for the gradients of the whole model until then.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hybridrl.config.schema import Accumulation, FSDPConfig


def begin_micro_batch(root: nn.Module, fsdp: FSDPConfig, *, last: bool) -> None:
    """Set what the next forward and backward leave to the last micro-batch of the step.

    full: gradients add up unsharded, in reduce_dtype (4 bytes per parameter of the whole model for
    float32), and the last backward reduces their sum. sharded: every backward reduce-scatters, so
    that shards add up; under hybrid sharding the last one sums over replicas. Weights that stay
    gathered after forward also stay so between micro-batches, since they change only at the end.

    Args:
        root: an FSDP2 root.
        fsdp: the sharding spec.
        last: whether the optimizer steps after this micro-batch.
    """
    assert isinstance(root, FSDPModule)
    if fsdp.accumulation is Accumulation.full:
        root.set_requires_gradient_sync(last)
    else:
        root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or fsdp.reshard_after_forward)
