"""vLLM's layers with FP8 weights, as its loader sees them and as they lie in memory.

vLLM loads [N, K] in the engine's dtype and keeps, in its place, FP8 of the same order and N scales.
Its loader is traced on the former, weight sync writes the latter. NAMES are the private names in
use.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.regions import FP8, Trace

# Value of vLLM's `quantization`.
PER_CHANNEL = "fp8_per_channel"
NAMES: tuple[tuple[str, str], ...] = (
    (
        "vllm.model_executor.model_loader.reload.layerwise",
        "_get_original_loader get_layerwise_info",
    ),
    ("vllm.model_executor.model_loader.reload.meta", "restore_layer_refs to_meta_tensor"),
    ("vllm.model_executor.layers.quantization.online.fp8", "Fp8PtpcOnlineLinearMethod"),
)


class Quantised(NamedTuple):
    """Tensors of an FP8 weight.

    Attributes:
        weight: bits, in the shape and order of what the loader fills.
        scale: float32, one for each row of it.
    """

    weight: Tensor
    scale: Tensor


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[dict[str, Quantised]]:
    """Within this context, layers with FP8 weights have those that vLLM's loader fills, on meta.

    Yields the FP8 weights by name.

    Raises:
        ConfigError: vLLM's kernel has changed the layout of a weight.
    """
    quantised: dict[str, Quantised] = {}
    changed: list[tuple[nn.Module, dict[str, Any]]] = []
    for path, layer in model.named_modules():
        live = dict(layer._parameters)
        names = [n for n, p in live.items() if p is not None and p.dtype is torch.float8_e4m3fn]
        if not names:
            continue
        filled = _as_created(layer)
        for name in names:
            tensors = _tensors(live, name, filled.get(name))
            if tensors is None:
                what = "in a layout of its kernel's, as with sizes that 16 does not divide"
                _refuse(f"{path}.{name}", what)
            quantised[f"{path}.{name}"] = tensors
        scales = {f"{name}_scale" for name in names}
        kept = {name: param for name, param in live.items() if name not in scales}
        changed.append((layer, layer._parameters))
        layer._parameters = kept | {name: filled[name] for name in names}
    try:
        yield quantised
    finally:
        for layer, parameters in changed:
            layer._parameters = parameters


def with_scales(trace: Trace, quantised: dict[str, Quantised]) -> tuple[Trace, dict[str, Tensor]]:
    """Return the trace with the FP8 weights' dtype and scales, and their tensors by its names.

    Raises:
        ConfigError: rows of a weight come from parts of several rows of the checkpoint.
    """
    whole = dict.fromkeys(quantised, 0)
    for name, region in ((copy.parameter, copy.region) for copy in trace.copies):
        if name in whole and region.shape[-1] == trace.parameters[name][-1]:
            whole[name] += region.numel
    for name, size in whole.items():
        if size != quantised[name].weight.numel():
            _refuse(name, "of other numbers than whole rows of the checkpoint")
    scales = {name: f"{name}_scale" for name in quantised}
    dtypes = dict(trace.dtypes) | dict.fromkeys(quantised, FP8)
    tensors = {name: tensor.weight for name, tensor in quantised.items()}
    tensors |= {scales[name]: tensor.scale for name, tensor in quantised.items()}
    return trace._replace(dtypes=dtypes, scales=scales), tensors


def _as_created(layer: nn.Module) -> dict[str, Any]:
    """Return a layer's parameters as vLLM creates and its loader fills them, without data."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import restore_layer_refs, to_meta_tensor

    parameters, _ = get_layerwise_info(layer).restore_metadata
    created = {}
    for name, parameter in parameters.items():
        created[name] = restore_layer_refs(to_meta_tensor(parameter), layer)
        created[name].weight_loader = _get_original_loader(created[name])
    return created


def _tensors(live: dict[str, Any], name: str, filled: Tensor | None) -> Quantised | None:
    """Return the tensors of a layer's FP8 weight; None if they are not of the loader's order."""
    scale = live.get(f"{name}_scale")
    weight = live[name].data.t() if live[name].dim() == 2 else live[name].data
    if filled is None or scale is None:
        return None
    rows = math.prod(filled.shape[:-1])
    same = weight.shape == filled.shape and weight.is_contiguous()
    if not same or scale.dtype is not torch.float32 or scale.numel() != rows:
        return None
    return Quantised(weight.view(FP8), scale.data)


def _refuse(name: str, what: str) -> NoReturn:
    raise ConfigError(
        f"vLLM keeps the FP8 weight {name} {what}, which a weight sync cannot write.\n"
        "Set rollout.weights=dtype."
    )
