"""Tiny models and checkpoints whole, in memory."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.forward.token_models import TokenLogProbs
from hybridrl.distributed.storage.checkpoint import StoredState
from hybridrl.distributed.storage.policy_weights import GatheredWeights


def full_state_dict(root: TokenLogProbs) -> dict[str, Tensor]:
    """Every weight of the causal LM on rank 0, float32 on CPU, nothing elsewhere; a collective."""
    weights = GatheredWeights(root)
    whole = {name: weights.read(name).to("cpu", copy=True) for name in weights.shapes}
    return whole if dist.get_rank() == 0 else {}


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors with a prefix of a folder of shards, on CPU, by key without the prefix."""
    state = StoredState(folder)
    keys = [key for key in state.tensors if key.startswith(prefix)]
    return {key.removeprefix(prefix): state.read(key) for key in keys}


def flat(grads: dict[str, Tensor]) -> Tensor:
    """All in one vector, in the order of their names."""
    return torch.cat([grads[name].flatten() for name in sorted(grads)])


def relative_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The norm of what differs over that of what is wanted."""
    assert found.keys() == wanted.keys()
    return float((flat(found) - flat(wanted)).norm() / flat(wanted).norm())


@dataclass(frozen=True)
class InMemory:
    """Weights that are in memory, by checkpoint name."""

    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]
