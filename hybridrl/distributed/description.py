"""Derivation of a model's shape from config.json, by running transformers' classes without data.

    python -m hybridrl.distributed.description < config.json

prints it, or the problem, as JSON. config/planner/description.py keeps what was printed.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.planner.description import as_data
from hybridrl.config.planner.families import (
    VISION,
    not_adapted,
    partial_rotation,
    rope_types,
    setting_problem,
    text_part,
    unsupported,
)
from hybridrl.config.planner.shape import (
    NO_VISION,
    ExpertShape,
    LayerShape,
    ModelShape,
    VisionShape,
)
from hybridrl.distributed.experts import checkpoint_tensors, replace_experts
from hybridrl.distributed.forward.layers import (
    LAYER_TYPES,
    check_layers,
    hand_on_bounds,
    layer_types,
)
from hybridrl.distributed.forward.recurrent import CONVOLUTION, RECURRENCES
from hybridrl.distributed.forward.routing import has_experts, router_of
from hybridrl.distributed.forward.token_models import divisor_and_cap
from hybridrl.distributed.forward.vision import (
    PIXELS,
    decoder,
    smallest_image,
    text_config,
    tower_blocks,
    vision_parts,
)
from hybridrl.distributed.probe import PROBE, Probe
from hybridrl.distributed.weights import class_with_head, settled

# Keys of config.json, hidden_<word>, that name a family's activation.
ACTIVATIONS = ("act", "activation")


def describe(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a config.json's model.

    Raises:
        ConfigError: transformers does not have the model, or it is not one that is trained here.
    """
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING or kind not in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION}:
        raise ConfigError(unsupported(config, "transformers has no language model of that type"))
    model = _built(config)
    if model.config.model_type != kind:
        why = f"its language model is of type {model.config.model_type}"
        raise ConfigError(unsupported(config, why))
    try:
        check_layers(model)
        replace_experts(model)
        hand_on_bounds(model)
        divisor_and_cap(model)
        probe = Probe(model)
        kept = probe.kept()
        _check_calls(model, probe)
        shape = _shape(model, probe, kept)
    except Exception as error:
        why = error.texts[0] if isinstance(error, ConfigError) else f"its run failed: {error}"
        raise ConfigError(unsupported(config, why.rstrip("."))) from error
    text = text_part(config)
    part = partial_rotation(text)
    is_whole = probe.rotated == shape.largest_attention.head_dim
    if part is not None and is_whole and "proportional" not in rope_types(text):
        why = "transformers' model rotates whole heads"
        raise ConfigError(setting_problem("partial_rotary_factor", part, "1", why))
    return shape


def _built(config: Mapping[str, Any]) -> PreTrainedModel:
    """Build the causal language model without data, with a probe in place of attention.

    Raises:
        ConfigError: transformers cannot build it.
    """
    usual: dict[str, Any] = {}
    try:
        usual = dict(text_part(CONFIG_MAPPING[config["model_type"]]().to_dict()))
        decoded = PretrainedConfig._decode_special_floats(dict(config))  # of infinity
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(decoded)
        with init_empty_weights(include_buffers=False):
            model = (
                class_with_head(config["model_type"])
                .from_config(
                    settled(settings),
                    dtype=torch.bfloat16,
                    attn_implementation="eager",
                    trust_remote_code=False,
                )
                .eval()
            )
    except Exception as error:
        text = text_part(config)
        absent = [key for key, value in usual.items() if key in text and text[key] is None]
        absent = [key for key in absent if type(usual[key]) is int]
        lacks = f"config.json lacks {', '.join(absent)}"
        why = f"config.json is wrong: transformers cannot build its model: {error}"
        remedy = "Copy the config.json that belongs to the weights"
        problem = Problem("model_sizes", "model.path", why=why, remedy=remedy)
        if absent:
            problem = Problem("model_lacks", "model.path", why=lacks)
        raise ConfigError(problem) from error
    act, known = (
        text_part(config).get("hidden_act"),
        [usual.get(f"hidden_{key}") for key in ACTIVATIONS],
    )
    if act not in (None, "silu", *known):
        raise ConfigError(setting_problem("hidden_act", act, "silu", "vLLM's model has no other"))
    text_config(model)._attn_implementation = PROBE
    model.tie_weights()
    return model


def _check_calls(model: PreTrainedModel, probe: Probe) -> None:
    """Check that each layer read other tokens as layers of its kind do, with its window."""
    if not probe.attention:
        raise ConfigError("none of its layers has attention")
    for index, (kind, called) in enumerate(zip(layer_types(model), probe.mixing, strict=True)):
        if called not in LAYER_TYPES[kind]:
            names = ", ".join(sorted(called)) or "none"
            raise ConfigError(
                f"layer {index} ({kind}) computes without the functions here that read other "
                f"tokens: it called {names}"
            )
        if kind == "sliding_attention" and probe.attention[index].window is None:
            raise ConfigError(f"layer {index} has its window in a mask alone, which is not built")


def _shape(model: PreTrainedModel, probe: Probe, kept: list[tuple[int, int]]) -> ModelShape:
    config: dict[str, Any] = text_config(model).to_dict()
    alike: dict[object, list[int]] = {}  # layers with equal parameters and attention
    for index, layer in enumerate(decoder(model).layers):
        sizes = tuple((name, tuple(param.shape)) for name, param in layer.named_parameters())
        alike.setdefault((sizes, probe.attention.get(index)), []).append(index)
    order = {index: kind for kind, same in enumerate(alike.values()) for index in same}
    return ModelShape(
        kind=model.config.model_type,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        max_positions=None,
        parameters=_elements(model),
        backbone_parameters=_elements(model.base_model),
        kinds=tuple(_layer_shape(model, probe, kept, same) for same in alike.values()),
        order=tuple(order[index] for index in range(len(order))),
        vision=_vision_shape(model),
    )


def _vision_shape(model: PreTrainedModel) -> VisionShape:
    """Return the shape of what makes states of images."""
    if not (parts := vision_parts(model)):
        return NO_VISION
    blocks, config = tower_blocks(model), model.config.vision_config
    layers = [block for block in blocks if type(block) is type(blocks[0])]
    # Of rows of patches, or of whole pictures of 2 states.
    pixels = smallest_image(model.config)[PIXELS]
    merged = (config.to_dict().get("spatial_merge_size") or model.config.spatial_merge_size) ** 2
    patches = len(pixels) if pixels.dim() == 2 else 2 * merged
    return VisionShape(
        parameters=sum(map(_elements, parts)),
        layers=len(layers),
        layer_parameters=_elements(layers[0]),
        width=config.hidden_size,
        intermediate=config.intermediate_size,
        side=config.patch_size,
        values=pixels.numel() // patches,
        merged=merged,
    )


def _layer_shape(
    model: PreTrainedModel, probe: Probe, kept: list[tuple[int, int]], same: list[int]
) -> LayerShape:
    """Return the shape of layers of one kind, given their numbers."""
    layers, index = decoder(model).layers, same[0]
    mixture = any(map(has_experts, layers))
    whole, low = (sum(sizes) // len(same) for sizes in zip(*(kept[i] for i in same), strict=True))
    return LayerShape(
        attention=probe.attention.get(index),
        recurrent=CONVOLUTION in probe.mixing[index],
        has_state=not probe.mixing[index].isdisjoint(RECURRENCES),
        experts=_experts(layers[index]),
        linear_layers=_linear_layers(probe.linear[index], model.config.model_type, mixture),
        parameters=_elements(layers[index]),
        kept=(whole, low),
        matrices=_matrices(model, index),
        latent=probe.latent.get(index, 0),
    )


def _elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _experts(layer: Any) -> ExpertShape | None:
    router = router_of(layer)
    if router is None:
        return None
    owner = layer if "experts" in layer._modules else layer.mlp
    number, hidden, inner = owner.experts.down_proj.shape
    linear = [m for m in layer.mlp.modules() if isinstance(m, nn.Linear)]
    shared = sum(m.in_features for m in linear if m.out_features == hidden)
    return ExpertShape(number, router.choice.top_k, inner, shared)


def _linear_layers(
    linear: Mapping[str, nn.Linear], kind: str, has_experts: bool
) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a layer's linear layers that can be adapted, by name.

    Not those beside experts, nor those that families.py refuses.
    """
    return {
        name.rpartition(".")[2]: (module.out_features, module.in_features)
        for name, module in linear.items()
        if not (has_experts and name.startswith("mlp."))
        and not not_adapted(kind, name.rpartition(".")[2])
    }


def _matrices(model: PreTrainedModel, index: int) -> dict[str, tuple[int, ...]]:
    """Return a layer's matrices, by their names in a layer of a checkpoint."""
    parameters, layer = dict(model.named_parameters()), decoder(model).layers[index]
    own = {*layer.parameters()}
    held = checkpoint_tensors(model, {n: p.shape for n, p in parameters.items() if p in own})
    return {
        tensor.name.partition(f".layers.{index}.")[2]: tensor.shape
        for tensors in held.values()
        for tensor in tensors
        if len(tensor.shape) > 1
    }


def main() -> None:
    """Describe the config.json on standard input."""
    try:
        print(json.dumps({"shape": asdict(describe(json.load(sys.stdin)))}))
    except ConfigError as error:
        print(json.dumps({"problems": [as_data(problem) for problem in error.problems]}))


if __name__ == "__main__":
    main()
