"""Low-rank adapters: the model's weights stay as they are, and some of them get an update.

    y = W x + alpha / r * B (A x)        W [out, in] frozen   A [r, in]   B [out, r], 0 at first

So the adapted model is at first the model, bit for bit. Modules have the names that peft gives
theirs, and checkpoint names are those of the model without adapters.

peft's own layers would do for training, but they switch an adapter off through requires_grad, which
FSDP2 reads once; the reference is the actor's model with its adapters off.

Source: Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.config.schema import LoRAConfig
from hybridrl.data.seeds import derive_seed


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter, whose weights are on the meta device at first.

    Args:
        base_layer: the layer.
        rank: r.
        scaling: alpha / r.

    Attributes:
        is_on: whether the adapter counts.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, device="meta")
        self.scaling = scaling
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """W x + bias, and the adapter's part if it is on."""
        result = self.base_layer(x)
        if self.is_on:
            result = result + self.lora_B(self.lora_A(x)) * self.scaling
        return result


@dataclass(frozen=True)
class Adapted:
    """A weight with an adapter, all three sharded: what a reshard or a checkpoint is made of.

    W and B are cut along dim 0 and A along dim 0, or W and A along dim 1 and B along dim 0, so
    that of the two factors one need not be gathered.

    Attributes:
        base, a, b: W, A and B.
        scaling: alpha / r.
    """

    base: DTensor
    a: DTensor
    b: DTensor
    scaling: float

    @torch.no_grad()
    def merged_shard(self) -> Tensor:
        """This rank's shard of W + alpha / r * B A: new, float32; a collective."""
        placement = self.base.placements[-1]
        assert isinstance(placement, Shard)
        if placement.dim == 0:
            update = self.b.to_local() @ self.a.full_tensor()
        else:
            update = self.b.full_tensor() @ self.a.to_local()
        return update.mul_(self.scaling).add_(self.base.to_local())

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The whole of W + alpha / r * B A with the bits of its shards; a collective."""
        return DTensor.from_local(
            self.merged_shard(),
            self.base.device_mesh,
            self.base.placements,
            run_check=False,
            shape=self.base.shape,
            stride=self.base.stride(),
        ).full_tensor()


def add_adapters(lm: nn.Module, lora: LoRAConfig) -> None:
    """Freeze a model and give the layers that lora.target_modules names their adapters."""
    lm.requires_grad_(False)
    for name, module in list(lm.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.target_modules:
            lm.set_submodule(name, LoRALinear(module, lora.rank, lora.alpha / lora.rank))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by their names in a checkpoint, in the model's order."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def checkpoint_parameters(
    lm: nn.Module, *, tied_twice: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a checkpoint has, under its names.

    Args:
        lm: with adapters or without.
        tied_twice: whether a tied tensor appears under each of its names.
    """
    for name, param in lm.named_parameters(remove_duplicate=not tied_twice):
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(".base_layer.", "."), param


def adapted_weights(lm: nn.Module) -> dict[str, Adapted]:
    """The weights that have adapters, by checkpoint name; to be called while all are sharded."""
    return {
        f"{name}.weight": Adapted(
            layer.base_layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scaling
        )
        for name, layer in adapters(lm).items()
    }


def first_factor(layer: LoRALinear, name: str, seed: int, device: torch.device) -> Tensor:
    """A, whole, the same on all ranks: uniform within 1 / sqrt(in), as peft draws it; float32.

    Args:
        layer: whose A it is.
        name: of the layer; each has its own numbers.
        seed: of all layers.
        device: where it is drawn.
    """
    shape = layer.lora_A.weight.shape
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "lora", name))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the one without adapters."""
    layers = adapters(model).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True
