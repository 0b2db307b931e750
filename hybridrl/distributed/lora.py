"""LoRA: frozen weights, some of which get a trained low-rank update.

    y = W x + alpha / r * B (A x)        W [out, in] frozen   A [r, in]   B [out, r], 0 at first

At first the adapted model equals the model, bit for bit. Modules have peft's names, and checkpoint
names are those of the model without adapters. The reference is the actor's model with its adapters
off. peft's own layers disable an adapter through requires_grad, which FSDP2 reads only once.

Source: Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridrl.config.schema import LoRAConfig
from hybridrl.distributed.forward.vision import decoder

# Of an adapter's output, times a factor, to that of its layer.
Addition = Callable[[Tensor, Tensor, float], Tensor]


class LoRALinear(nn.Module):
    """Frozen linear layer with an adapter, whose weights are first on the meta device."""

    def __init__(self, base_layer: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, device="meta")
        self.scaling = scaling
        self.add: Addition = add_update
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + bias, plus the adapter's part if it is on."""
        result = self.base_layer(x)
        if self.is_on:
            result = self.add(result, self.lora_B(self.lora_A(x)), self.scaling)
        return result


def add_update(result: Tensor, update: Tensor, scaling: float) -> Tensor:
    """Add an adapter's output to that of its layer."""
    return result + update * scaling


def add_adapters(lm: PreTrainedModel, lora: LoRAConfig) -> None:
    """Freeze a model and add adapters to its text layers that are in lora.target_modules."""
    lm.requires_grad_(False)
    text = {*decoder(lm).layers.modules()}
    for name, module in list(lm.named_modules()):
        is_target = isinstance(module, nn.Linear) and module in text
        if is_target and name.rpartition(".")[2] in lora.target_modules:
            lm.set_submodule(name, LoRALinear(module, lora.rank, lora.alpha / lora.rank))


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapted layers by checkpoint name, in the model's order."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)
    }


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of each adapted layer, as <layer>.lora_A.weight and <layer>.lora_B.weight."""
    return {name: param for name, param in model.named_parameters() if ".lora_" in name}


def checkpoint_parameters(
    lm: nn.Module, *, tied_twice: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a checkpoint by name; `tied_twice`: tied ones under each name."""
    for name, param in lm.named_parameters(remove_duplicate=not tied_twice):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), param


def checkpoint_buffers(lm: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the buffers of a checkpoint by name: factors and offsets that are not trained."""
    named, stored = lm.named_buffers(prefix=prefix.rstrip(".")), lm.state_dict().keys()
    kept = {name: b for name, b in named if b.is_floating_point() and b.ndim}
    return {name: b for name, b in kept.items() if name.removeprefix(prefix) in stored}


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
