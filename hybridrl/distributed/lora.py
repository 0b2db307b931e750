"""LoRA: frozen weights, some of which get a trained low-rank update.

    y = W x + alpha / r * B (A x)        W [out, in] frozen   A [r, in]   B [out, r], 0 at first

At first the adapted model equals the model, bit for bit. Modules have peft's names, and checkpoint
names are those of the model without adapters.

The reference is the actor's model with its adapters off. peft's own layers do not fit: they disable
an adapter through requires_grad, which FSDP2 reads only once.

Source: Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from hybridrl.config.schema import LoRAConfig
from hybridrl.data.seeds import derive_seed


class LoRALinear(nn.Module):
    """Frozen linear layer with an adapter, whose weights are first on the meta device.

    Args:
        base_layer: the layer.
        rank: r.
        scaling: alpha / r.

    Attributes:
        is_on: true while the adapter is active.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, device="meta")
        self.scaling = scaling
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + bias, plus the adapter's part if it is on."""
        result = self.base_layer(x)
        if self.is_on:
            result = result + self.lora_B(self.lora_A(x)) * self.scaling
        return result


@dataclass(frozen=True)
class AdaptedWeight:
    """Weight with an adapter, all three sharded.

    W, A and B are cut along dim 0, or W and A along dim 1 and B along dim 0. A shard of their sum
    thus needs only one whole factor.

    Attributes:
        base, a, b: W, A and B.
        scaling: alpha / r.
    """

    base: DTensor
    a: DTensor
    b: DTensor
    scaling: float

    @property
    def is_cut_by_rows(self) -> bool:
        """True if W is cut along dim 0."""
        placement = self.base.placements[-1]
        assert isinstance(placement, Shard)
        return placement.dim == 0

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of W + alpha / r * B A: new, float32.

        Args:
            whole: A if W is cut by rows, else B.
        """
        rows = self.is_cut_by_rows
        b, a = (self.b.to_local(), whole) if rows else (whole, self.a.to_local())
        return torch.addmm(self.base.to_local(), b, a, alpha=self.scaling)


class AdapterMerger:
    """Merge of adapters into shards of their weights, for an export.

    Args:
        weights: adapted weights by checkpoint name.
    """

    def __init__(self, weights: dict[str, AdaptedWeight]) -> None:
        self._weights = weights
        self._whole: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    @torch.no_grad()
    def gather(self) -> None:
        """Gather one factor of each adapter as it is now; one collective of the shard group.

        They stay until the next call.
        """
        factors = [w.a if w.is_cut_by_rows else w.b for w in self._weights.values()]
        self._whole = dict(zip(self._weights, gather_rows(factors), strict=True))

    @torch.no_grad()
    def shard(self, name: str) -> Tensor:
        """Return this rank's shard of the merged weight, with the last gathered factor."""
        return self._weights[name].shard(self._whole[name])

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """Return the whole merged weight, bit for bit its shards; a collective."""
        base = self._weights[name].base
        merged = DTensor.from_local(
            self.shard(name),
            base.device_mesh,
            base.placements,
            run_check=False,
            shape=base.shape,
            stride=base.stride(),
        )
        return merged.full_tensor()


def gather_rows(factors: Sequence[DTensor]) -> list[Tensor]:
    """Gather tensors that are cut along dim 0 over one group, by one all-gather.

    One all-gather for each of hundreds would take longer than the move of the weights.
    """
    if not factors:
        return []
    mesh = factors[0].device_mesh
    group, ranks = mesh.get_group(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    if ranks == 1:
        return [factor.to_local() for factor in factors]
    rows = [-(-factor.shape[0] // ranks) for factor in factors]  # of every shard, padded
    own = []
    for factor, height in zip(factors, rows, strict=True):
        local = factor.to_local()
        own.append(functional.pad(local, (0, 0, 0, height - len(local))).flatten())
    flat = torch.cat(own)
    everyones = flat.new_empty((ranks, len(flat)))
    dist.all_gather(list(everyones), flat, group=group)
    parts = everyones.split([len(part) for part in own], dim=1)
    return [
        part.reshape(-1, factor.shape[1])[: factor.shape[0]]
        for part, factor in zip(parts, factors, strict=True)
    ]


def add_adapters(lm: nn.Module, lora: LoRAConfig) -> None:
    """Freeze a model and add adapters to the layers in lora.target_modules."""
    lm.requires_grad_(False)
    for name, module in list(lm.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.target_modules:
            lm.set_submodule(name, LoRALinear(module, lora.rank, lora.alpha / lora.rank))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapted layers by checkpoint name, in the model's order."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def checkpoint_parameters(
    lm: nn.Module, *, tied_twice: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a checkpoint, by checkpoint name.

    Args:
        lm: model with or without adapters.
        tied_twice: yield a tied tensor under each of its names.
    """
    for name, param in lm.named_parameters(remove_duplicate=not tied_twice):
        if ".lora_A." not in name and ".lora_B." not in name:
            yield name.replace(".base_layer.", "."), param


def build_merger(lm: nn.Module) -> AdapterMerger:
    """Build the merger of a model's adapters; call it while all weights are sharded."""
    return AdapterMerger(
        {
            f"{name}.weight": AdaptedWeight(
                layer.base_layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scaling
            )
            for name, layer in adapters(lm).items()
        }
    )


def first_factor(layer: LoRALinear, name: str, seed: int, device: torch.device) -> Tensor:
    """Draw a whole A, equal on all ranks: uniform within 1 / sqrt(in), as peft does; float32.

    Args:
        layer: the adapted layer.
        name: name of the layer, part of the seed.
        seed: seed of all layers.
        device: device of the generator.
    """
    shape = layer.lora_A.weight.shape
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "lora", name))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn all adapters of a model off within this context."""
    layers = adapters(model).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True
