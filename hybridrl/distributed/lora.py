"""Low-rank adapters: the model's weights stay as they are, and some of them get an update.

    y = W x + alpha / r * B (A x)        W [out, in] frozen   A [r, in]   B [out, r], 0 at first

So the adapted model is at first the model, bit for bit. Modules have the names that peft gives
theirs, and checkpoint names are those of the model without adapters.

peft's own layers would do for training, but they switch an adapter off through requires_grad, which
FSDP2 reads once; the reference is the actor's model with its adapters off.

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
    """A weight with an adapter, all three sharded.

    W and B are cut along dim 0 and A along dim 0, or W and A along dim 1 and B along dim 0, so
    that for a shard of their sum only one of the factors has to be whole.

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
        """Whether W is cut along dim 0."""
        placement = self.base.placements[-1]
        assert isinstance(placement, Shard)
        return placement.dim == 0

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's shard of W + alpha / r * B A: new, float32.

        Args:
            whole: A where W is cut by rows, else B.
        """
        rows = self.is_cut_by_rows
        b, a = (self.b.to_local(), whole) if rows else (whole, self.a.to_local())
        return torch.addmm(self.base.to_local(), b, a, alpha=self.scaling)


class Merger:
    """Merges adapters into shards of the weights they adapt, for an export.

    Args:
        weights: by checkpoint name.
    """

    def __init__(self, weights: dict[str, Adapted]) -> None:
        self._weights = weights
        self._whole: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    @torch.no_grad()
    def gather(self) -> None:
        """Have one factor of each adapter whole, as it is now; one collective of the shard group.

        They stay until the next call.
        """
        factors = [w.a if w.is_cut_by_rows else w.b for w in self._weights.values()]
        self._whole = dict(zip(self._weights, gather_rows(factors), strict=True))

    @torch.no_grad()
    def shard(self, name: str) -> Tensor:
        """This rank's shard of the merged weight, with the factor that was gathered last."""
        return self._weights[name].shard(self._whole[name])

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """All of the merged weight, with the bits of its shards; a collective."""
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
    """The whole of tensors that are cut along dim 0 over one group, by one all-gather.

    One for each would take longer than moving the weights: there are hundreds.
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


def merger_of(lm: nn.Module) -> Merger:
    """What merges a model's adapters; to be called while all weights are sharded."""
    return Merger(
        {
            f"{name}.weight": Adapted(
                layer.base_layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scaling
            )
            for name, layer in adapters(lm).items()
        }
    )


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
