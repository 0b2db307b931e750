"""LoRA inside vLLM's linear layers: y = W x + alpha / r * B (A x).

W stays as vLLM loads it. A and B are parameters beside it, which a reshard writes like any other.
vLLM thus computes the same as the trainer (distributed/lora.py). Merged into a bfloat16 W, updates
below half an ulp would be rounded away.

One vLLM layer may hold several layers of the checkpoint (q, k and v; gate and up). Their A are
stacked, their B are the blocks of one matrix that is 0 elsewhere:

    W [q; k; v]        lora_A [A_q; A_k; A_v]        lora_B [B_q  0   0 ]
                                                            [ 0  B_k  0 ]
                                                            [ 0   0  B_v]

The trace lists each block of W on this rank. Its adapter has the same rows of B and the same
columns of A, so tensor parallelism needs no further rules.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hybridrl.config.schema import LoRAConfig
from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill


class AdaptedLinear:
    """Linear method of a vLLM layer with adapters; wraps the layer's own `quant_method`.

    Args:
        base: the layer's own method.
        scaling: alpha / r.
    """

    def __init__(self, base: Any, scaling: float) -> None:
        self._base = base
        self._scaling = scaling

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return W x + bias + alpha / r * B (A x), rounded in the trainer's order."""
        update = F.linear(F.linear(x, layer.lora_A), layer.lora_B)
        return self._base.apply(layer, x, bias) + update * self._scaling


def add_adapters(model: nn.Module, trace: Trace, lora: LoRAConfig) -> None:
    """Add adapters of zeros to the layers that hold weights of lora.target_modules.

    Args:
        model: vLLM's model, loaded and not yet compiled.
        trace: trace of its loader.
        lora: the trainer's adapters.
    """
    for layer_name, copies in _adapted(trace, lora):
        layer: Any = model.get_submodule(layer_name)
        height, width = layer.weight.shape
        rank = lora.rank * len(copies)
        layer.lora_A = nn.Parameter(layer.weight.new_zeros(rank, width), requires_grad=False)
        layer.lora_B = nn.Parameter(layer.weight.new_zeros(height, rank), requires_grad=False)
        layer.quant_method = AdaptedLinear(layer.quant_method, lora.alpha / lora.rank)


def trace_with_adapters(trace: Trace, lora: LoRAConfig) -> Trace:
    """Add the writes into lora_A and lora_B to the trace of a model.

    Args:
        trace: trace of the loader, without adapters.
        lora: the trainer's adapters; A and B of q_proj are the sources q_proj.lora_A.weight and
            q_proj.lora_B.weight.
    """
    copies, fills, r = list(trace.copies), list(trace.fills), lora.rank
    for layer, parts in _adapted(trace, lora):
        height = trace.parameters[f"{layer}.weight"][0]
        for number, part in enumerate(parts):
            (row, column), (rows, columns) = part.region
            name, top, left = part.source.removesuffix("weight"), part.offset[0], number * r
            bottom = top + rows
            a, b = Region((0, column), (r, columns)), Region((row, 0), (rows, r))
            copies.append(
                TracedCopy(f"{name}lora_A.weight", a, f"{layer}.lora_A", (left, part.offset[1]))
            )
            copies.append(TracedCopy(f"{name}lora_B.weight", b, f"{layer}.lora_B", (top, left)))
            fills += [
                TracedFill(f"{layer}.lora_B", Region((start, left), (stop - start, r)), 0.0)
                for start, stop in ((0, top), (bottom, height))
                if stop > start
            ]
    return trace._replace(copies=copies, fills=fills)


def _adapted(trace: Trace, lora: LoRAConfig) -> Iterator[tuple[str, list[TracedCopy]]]:
    """Yield the names of vLLM's adapted layers, each with its copies of checkpoint weights."""
    found: dict[str, list[TracedCopy]] = {}
    for copy in trace.copies:
        if copy.source.rpartition(".weight")[0].rpartition(".")[2] in lora.target_modules:
            found.setdefault(copy.parameter.removesuffix(".weight"), []).append(copy)
    for layer, copies in found.items():
        assert len({copy.source for copy in copies}) == len(copies), f"{layer} splits a weight"
        yield layer, copies
