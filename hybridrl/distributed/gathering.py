"""Gathered weights of a sharded policy, one tensor at a time."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl.distributed import position
from hybridrl.distributed.accumulation import free_gathered_weights
from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.lora import build_merger, checkpoint_parameters


class GatheredWeights:
    """Weights of the causal LM by checkpoint name, each gathered when it is read.

    Construction and reads are collectives. All ranks read all weights in the order of `shapes`; a
    rank that stops early calls `read_rest`. Tied tensors appear once. Adapters are merged.

    Args:
        root: the policy, which must be idle.

    Attributes:
        shapes: shapes by checkpoint name.
    """

    def __init__(self, root: TokenLogProbs) -> None:
        free_gathered_weights(root)
        self._merger = build_merger(root.lm)
        self._merger.gather()
        self._parameters = dict(checkpoint_parameters(root.lm))
        self._rest = list(self._parameters)
        self.shapes = {name: param.shape for name, param in self._parameters.items()}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Gather the next weight: float32 on the device, perhaps a view of a larger storage."""
        assert name == self._rest.pop(0), name
        position.at("gathered weight", len(self.shapes) - len(self._rest), len(self.shapes))
        if name in self._merger:
            return self._merger.whole(name)
        param = self._parameters[name]
        assert isinstance(param, DTensor)
        return param.full_tensor()

    def read_rest(self) -> None:
        """Join the collectives of the weights that were not read."""
        while self._rest:
            self.read(self._rest[0])
