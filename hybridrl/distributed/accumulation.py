"""Gradient accumulation under FSDP2: fewer collectives between the micro-batches of a step.

By default FSDP2 reduce-scatters after every backward and gathers weights in every forward. The sum
over micro-batches can be reduced once if every rank has memory for the gradients of the whole
model. That memory is also enough for the gathered weights of a forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hybridrl.config.choices import Accumulation
from hybridrl.config.schema import FSDPConfig


def begin_micro_batch(root: nn.Module, fsdp: FSDPConfig, *, last: bool) -> None:
    """Set which collectives the next forward and backward postpone to the last micro-batch.

    full: gradients accumulate unsharded, in reduce_dtype (4 bytes per parameter of the whole model
    for float32), and the last backward reduces their sum. sharded: every backward reduce-scatters;
    under hybrid sharding the last one sums over replicas. Weights that stay gathered after forward
    also stay so between micro-batches, since they change only at the end.

    Args:
        root: an FSDP2 root.
        fsdp: the sharding spec.
        last: true if the optimizer steps after this micro-batch.
    """
    assert isinstance(root, FSDPModule)
    if fsdp.accumulation is Accumulation.full:
        root.set_requires_gradient_sync(last)
    else:
        root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or fsdp.reshard_after_forward)


@contextmanager
def gathered_once(root: nn.Module, fsdp: FSDPConfig) -> Iterator[None]:
    """Gather each weight once for all forwards within this context, which have no backward.

    Needs memory for all parameters in param_dtype, less than an update with accumulation=full.
    Under sharded accumulation nothing changes. In the end all weights are sharded again; without a
    backward, FSDP2 would keep at least the root's.

    Args:
        root: an FSDP2 root.
        fsdp: the sharding spec.
    """
    assert isinstance(root, FSDPModule)
    changes = fsdp.accumulation is Accumulation.full and fsdp.reshard_after_forward
    if changes:
        root.set_reshard_after_forward(False)
    yield
    free_gathered_weights(root)
    if changes:
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)  # backward begins with the root


def free_gathered_weights(root: nn.Module) -> None:
    """Free all gathered weights of an FSDP2 root."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
