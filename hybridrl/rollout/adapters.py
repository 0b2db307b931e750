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
columns of A, so tensor parallelism needs no further rules. A layer that is fused in the checkpoint,
too, has one adapter, of whose B a rank may hold several blocks of rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridrl.config.schema import LoRAConfig
from hybridrl.distributed.forward.exact_ops import add_scaled
from hybridrl.distributed.lora import Addition, add_update
from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.distributed.weights import LANGUAGE_MODEL


class AdaptedLinear:
    """Linear method of a vLLM layer with adapters; wraps the layer's own `quant_method`.

    Args:
        base: the layer's own method.
        scaling: alpha / r.
        add: adds both parts, as in the trainer.
    """

    def __init__(self, base: Any, scaling: float, add: Addition) -> None:
        self._base = base
        self._scaling = scaling
        self._add = add

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return W x + bias + alpha / r * B (A x), rounded in the trainer's order."""
        update = F.linear(F.linear(x, layer.lora_A), layer.lora_B)
        return self._add(self._base.apply(layer, x, bias), update, self._scaling)


def add_adapters(model: nn.Module, trace: Trace, lora: LoRAConfig, *, exact: bool) -> Trace:
    """Add adapters of zeros to the layers that hold weights of lora.target_modules.

    Args:
        model: vLLM's model, loaded and not yet compiled.
        trace: trace of its loader.
        lora: the trainer's adapters; A and B of q_proj are the sources q_proj.lora_A.weight and
            q_proj.lora_B.weight.
        exact: true adds by the operation that the trainer shares.

    Returns:
        The trace, with the writes into lora_A and lora_B.
    """
    copies, fills, shapes = list(trace.copies), list(trace.fills), dict(trace.parameters)
    for name, sources in _adapted(trace, lora):
        layer: Any = model.get_submodule(name)
        height, width = trace.parameters[f"{name}.weight"]
        rank = lora.rank * len(sources)
        # FP8 weights, whose shape is transposed, are those of a bfloat16 engine.
        dtype = torch.bfloat16 if f"{name}.weight" in trace.scales else layer.weight.dtype
        a, b = (layer.weight.new_zeros(s, dtype=dtype) for s in ((rank, width), (height, rank)))
        layer.lora_A = nn.Parameter(a, requires_grad=False)
        layer.lora_B = nn.Parameter(b, requires_grad=False)
        if "_use_min_latency_gemm" in vars(layer):  # a kernel in place of the linear method
            layer._use_min_latency_gemm = False
        add = add_scaled if exact else add_update
        layer.quant_method = AdaptedLinear(layer.quant_method, lora.alpha / lora.rank, add)
        shapes |= {f"{name}.lora_A": (rank, width), f"{name}.lora_B": (height, rank)}
        written = _writes(name, sources, height, lora.rank)
        copies += written[0]
        fills += written[1]
    return trace._replace(copies=copies, fills=fills, parameters=shapes)


def _writes(
    layer: str, sources: dict[str, list[TracedCopy]], height: int, r: int
) -> tuple[list[TracedCopy], list[TracedFill]]:
    """Return the copies and fills of a layer's adapters."""
    copies, fills = [], []
    for number, (source, parts) in enumerate(sources.items()):
        name, left, top = source.removesuffix("weight"), number * r, 0
        (_, column), (_, columns) = parts[0].region
        a = Region((0, column), (r, columns))
        start = (left, parts[0].offset[1])
        copies.append(TracedCopy(f"{name}lora_A.weight", a, f"{layer}.lora_A", start))
        for part in sorted(parts, key=lambda part: part.offset):
            rows = part.region.shape[0]
            b = Region((part.region.offset[0], 0), (rows, r))
            start = (part.offset[0], left)
            copies.append(TracedCopy(f"{name}lora_B.weight", b, f"{layer}.lora_B", start))
            fills += _zeros(layer, left, r, top, part.offset[0])
            top = part.offset[0] + rows
        fills += _zeros(layer, left, r, top, height)
    return copies, fills


def _zeros(layer: str, left: int, r: int, start: int, stop: int) -> list[TracedFill]:
    """Return the fill of rows of lora_B that belong to other layers of the checkpoint."""
    region = Region((start, left), (stop - start, r))
    return [TracedFill(f"{layer}.lora_B", region, 0.0)] if stop > start else []


def _adapted(trace: Trace, lora: LoRAConfig) -> Iterator[tuple[str, dict[str, list[TracedCopy]]]]:
    """Yield the names of vLLM's adapted layers, each with its copies by checkpoint weight.

    As in the trainer, those of a tower are not adapted.
    """
    layers: dict[str, dict[str, list[TracedCopy]]] = {}
    for copy in [one for one in trace.copies if LANGUAGE_MODEL in one.source] or trace.copies:
        if copy.source.rpartition(".weight")[0].rpartition(".")[2] in lora.target_modules:
            layer = layers.setdefault(copy.parameter.removesuffix(".weight"), {})
            layer.setdefault(copy.source, []).append(copy)
    for layer_name, sources in layers.items():
        for source, parts in sources.items():
            columns = {(part.region.offset[1], part.region.shape[1]) for part in parts}
            assert len(columns) == 1, f"{layer_name} splits the columns of {source}"
        yield layer_name, sources
