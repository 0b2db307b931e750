"""Weights that FSDP2 gathers: for how long, with which collectives, and whole ones for an export.

By default FSDP2 reduce-scatters after every backward and gathers weights in every forward. The sum
over micro-batches can be reduced once if every rank has memory for the gradients of the whole
model. That memory is also enough for the gathered weights of a forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridrl.config.choices import Accumulation
from hybridrl.config.schema import FSDPConfig
from hybridrl.distributed import position
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.lora import (
    adapter_parameters,
    adapters,
    checkpoint_parameters,
    merged_weight,
)


def begin_micro_batch(root: nn.Module, fsdp: FSDPConfig, *, last: bool) -> None:
    """Set which collectives the next forward and backward postpone to the last micro-batch.

    full: gradients accumulate unsharded, in reduce_dtype (4 bytes per parameter of the whole model
    for float32), and the last backward reduces their sum. sharded: every backward reduce-scatters;
    under hybrid sharding the last one sums over replicas. Weights that stay gathered after forward
    also stay so between micro-batches, since they change only at the end.
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


class GatheredWeights:
    """Weights of an idle policy by checkpoint name, each gathered when it is read.

    Reads are collectives. All ranks read all weights in the order of `shapes`; a rank that stops
    early calls `read_rest`. Tied tensors appear once. Adapters are merged.
    """

    def __init__(self, root: TokenLogProbs) -> None:
        free_gathered_weights(root)
        self._adapted = {f"{name}.weight": layer for name, layer in adapters(root.lm).items()}
        self._parameters = dict(checkpoint_parameters(root.lm))
        self._rest = list(self._parameters)
        self.shapes = {name: param.shape for name, param in self._parameters.items()}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Gather the next weight: float32 on the device, perhaps a view of a larger storage."""
        assert name == self._rest.pop(0), name
        position.at("gathered weight", len(self.shapes) - len(self._rest), len(self.shapes))
        if name in self._adapted:
            return merged_weight(self._adapted[name])
        param = self._parameters[name]
        assert isinstance(param, DTensor)
        return param.full_tensor()

    def read_rest(self) -> None:
        """Join the collectives of the weights that were not read."""
        while self._rest:
            self.read(self._rest[0])


def adapter_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """Gather the adapters' float32 weights by peft's names, on rank 0's CPU; a collective."""
    free_gathered_weights(root)
    kept = {}
    for name, weight in adapter_parameters(root.lm).items():
        whole = weight.detach().full_tensor()
        if dist.get_rank() == 0:  # a copy: it may be a view of a padded, larger storage
            kept[f"base_model.model.{name}"] = whole.to("cpu", copy=True)
    return kept
