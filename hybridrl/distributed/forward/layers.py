"""Decoder layers of transformers' models: which kinds are trained, and how a layer is run.

A layer consists of linear layers, norms, experts, packed attention and packed recurrences. What has
other parameters computes something that nobody looked at here, and is refused by name.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.forward.attention import BOUNDS
from hybridrl.distributed.forward.recurrent import CONVOLUTION, RECURRENCES
from hybridrl.distributed.forward.routing import has_experts, layer_forward
from hybridrl.distributed.forward.vision import decoder, text_config, vision_parts

ATTENTION = "attention"
# Kinds of layers in config.json, and the functions that read other tokens in one: no others may be
# called, and each gets the bounds of sequences. Attention's arguments tell windows apart.
LAYER_TYPES: dict[str, list[set[str]]] = {
    "full_attention": [{ATTENTION}],
    "sliding_attention": [{ATTENTION}],
    "linear_attention": [{CONVOLUTION, name} for name in RECURRENCES],
    "conv": [{CONVOLUTION}],
    "mlp": [set()],
}
# Parameters of recurrent mixers, vectors with a number for each head.
STATE = {"A_log", "D", "dt_bias"}
# Parts beside embedding, layers, norms and head: inputs of each layer by token (Gemma 4).
FURTHER = {"embed_tokens_per_layer", "per_layer_model_projection"}
EXPERTS = ("gate_up_proj", "down_proj")
# Parameters that are computed here, of parts of layers that are no linear layer and no norm.
KNOWN = (
    ("self_attn", {"sinks"}),
    ("mlp.experts", {*EXPERTS}),
    ("mlp.experts", {*EXPERTS, *(f"{name}_bias" for name in EXPERTS)}),
    ("mlp.gate", {"weight"}),
    ("mlp.router", {"weight", "bias"}),
    ("experts", {*EXPERTS}),
    ("router", {"scale", "per_expert_scale"}),
)


def check_layers(model: PreTrainedModel) -> None:
    """Check that a model of transformers, built without data, has only layers of known kinds.

    Raises:
        ConfigError: names what is not known.
    """
    base = decoder(model)
    if "layers" not in dict(base.named_children()):
        raise ConfigError(f"its {type(base).__name__} has no decoder layers in `layers`")
    config: dict[str, Any] = text_config(model).to_dict()
    others = sorted({*layer_types(model)} - LAYER_TYPES.keys())
    if config.get("attention_chunk_size"):
        others.append("attention_chunk_size")
    for index, layer in enumerate(base.layers):
        others += [f"layers.{index}{part}" for part in _unknown(layer)]
    usual = {base, base.layers, model.get_input_embeddings(), model.get_output_embeddings()}
    usual |= {model.base_model, *vision_parts(model)}
    for path, module in {*base.named_children(), *model.named_children()}:
        has_weights = next(module.parameters(), None) is not None
        known = path in FURTHER or module in usual or "Norm" in type(module).__name__
        if has_weights and not known:
            others.append(f"{path} ({type(module).__name__})")
    if others:
        raise ConfigError(
            f"it has {', '.join(others[:3])}; known are linear layers, norms, experts and "
            f"recurrent mixers, in layers of the kinds {', '.join(LAYER_TYPES)}"
        )


def shares_prefixes(root: nn.Module) -> bool:
    """Return whether a role's model can compute equal first tokens once (`Keys` of packing.py).

    All of its layers then are attention without experts, as shares of experts are by sequence.
    """
    model = root.lm if hasattr(root, "lm") else root.backbone
    return not root.recurrent and not any(map(has_experts, decoder(model).layers))


def layer_types(model: PreTrainedModel) -> list[str]:
    """Return the kind of each decoder layer, as config.json or its model names it."""
    config: dict[str, Any] = text_config(model).to_dict()
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return kinds or ["full_attention"] * len(decoder(model).layers)


def _unknown(layer: nn.Module) -> Iterator[str]:
    """Yield the parameters of a layer whose use is not known, with their modules' classes."""
    for path, module in layer.named_modules():
        kind = type(module).__name__
        own = dict(module.named_parameters(recurse=False))
        is_norm = "Norm" in kind and all(param.dim() == 1 for param in own.values())
        is_state = own and own.keys() <= STATE and all(param.dim() == 1 for param in own.values())
        is_depthwise = isinstance(module, nn.Conv1d) and module.groups == module.out_channels
        if isinstance(module, nn.Linear) or is_norm or is_state or is_depthwise:
            continue
        if (path, {*own}) in KNOWN and vars(module).get("has_gate", True):
            continue
        yield from (f"{path and '.'}{path}.{name} of {kind}" for name in own)


def layer_function(layer: nn.Module) -> Callable[..., Any]:
    """Return what runs a decoder layer: takes it, hidden states and keyword arguments."""
    if has_experts(layer):
        return layer_forward
    kept = [module for module in layer.children() if "packed_bounds" in vars(module)]
    return _bounded_forward if kept else type(layer).forward


def hand_on_bounds(model: PreTrainedModel) -> None:
    """Make the layers whose code keeps the bounds of sequences from attention hand them on.

    Raises:
        ConfigError: these have experts.
    """
    for layer in decoder(model).layers:
        if "self_attn" not in dict(layer.named_children()):
            continue  # its mixer gets the bounds, or refuses to run
        if _hands_on(layer, text_config(model).hidden_size):
            continue
        if has_experts(layer):
            raise ConfigError("its layers with experts keep bounds of sequences from attention")
        layer.self_attn.packed_bounds = None
        layer.forward = partial(_bounded_forward, layer)


def _bounded_forward(layer: Any, states: torch.Tensor, **kwargs: Any) -> Any:
    """Run a layer whose attention reads the bounds of sequences from its module."""
    layer.self_attn.packed_bounds = {name: kwargs[name] for name in BOUNDS if name in kwargs}
    output = type(layer).forward(layer, states, **kwargs)
    layer.self_attn.packed_bounds = None
    return output


class _Reached(Exception):
    """Attention was called; the argument says whether with bounds."""


def _hands_on(layer: Any, hidden_size: int) -> bool:
    """Return whether a layer without data calls its attention with the bounds of sequences."""

    def reached(module: object, args: object, kwargs: dict[str, object]) -> None:
        raise _Reached(BOUNDS[0] in kwargs)

    hidden = next(layer.parameters()).new_zeros(1, 1, hidden_size)
    hook = layer.self_attn.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        type(layer).forward(layer, hidden, position_embeddings=(hidden, hidden), **{BOUNDS[0]: 0})
    except _Reached as error:
        return bool(error.args[0])
    finally:
        hook.remove()
    return False
