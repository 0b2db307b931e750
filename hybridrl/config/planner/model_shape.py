"""The shape of a config.json's model: plain mistakes first, then what transformers makes of it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config.annotations import LARGEST_COUNT
from hybridrl.config.errors import ConfigError, Problem, shown
from hybridrl.config.planner.description import described
from hybridrl.config.planner.families import check_settings, largest_position, text_part
from hybridrl.config.planner.shape import ModelShape

# Mandatory keys of config.json.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# Sizes above 0; others than REQUIRED may be absent or null.
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
# Numbers of experts, by the families' names.
EXPERTS = ("num_local_experts", "num_experts")
# More layers, or experts of one, than any model has: each is built.
MOST = {"num_hidden_layers": 1024} | dict.fromkeys(EXPERTS, 4096)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a config.json's model.

    Raises:
        ConfigError: unsupported architecture, quantized weights, or missing or wrong keys.
    """
    check_settings(config)
    whole, config = config, text_part(config)
    listed = config.get("layers_block_type") and "num_hidden_layers"  # Nemotron-H has either
    missing = [key for key in REQUIRED if config.get(key) is None and key != listed]
    if missing:
        raise ConfigError(
            Problem("model_lacks", "model.path", why=f"config.json lacks {', '.join(missing)}")
        )
    _refuse(_wrong_sizes(config) or _wrong_relations(config))
    shape = described(whole)
    heads, _, head_dim, _ = shape.largest_attention
    if config.get("head_dim") is None and head_dim == shape.hidden // heads:
        _refuse([_undivided(config)] if shape.hidden % heads else [])
    return replace(shape, max_positions=largest_position(config))


def _wrong_sizes(config: Mapping[str, Any]) -> list[str]:
    sizes: dict[str, Any] = {key: config.get(key) for key in (*SIZES, *EXPERTS)}
    sizes["max_position_embeddings"] = largest_position(config)
    sizes["sliding_window"] = config.get("sliding_window") or None  # 0 as null
    wrong = [
        f"{key} = {shown(repr(size))}, expected an integer above 0"
        for key, size in sizes.items()
        if size is not None and (type(size) is not int or not 0 < size <= LARGEST_COUNT)
    ]
    wrong += [
        f"{key} = {sizes[key]}, expected at most {most}"
        for key, most in MOST.items()
        if type(sizes[key]) is int and most < sizes[key] <= LARGEST_COUNT
    ]
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        wrong.append(f"rms_norm_eps = {shown(repr(eps))}, expected a number of at least 0")
    return wrong


def _wrong_relations(config: Mapping[str, Any]) -> list[str]:
    heads, active = config["num_attention_heads"], config.get("num_experts_per_tok")
    if heads % (config.get("num_key_value_heads") or heads):
        return [_undivided(config)]
    return [
        f"num_experts_per_tok = {active} is more than {key} = {config[key]}"
        for key in EXPERTS
        if config.get(key) and type(active) is int and active > config[key]
    ]


def _undivided(config: Mapping[str, Any]) -> str:
    named = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    return ", ".join(f"{key} = {shown(config.get(key))}" for key in named) + " do not divide"


def _refuse(wrong: list[str]) -> None:
    if wrong:
        why = f"config.json is wrong: {'; '.join(wrong)}"
        remedy = "Copy the config.json that belongs to the weights"
        raise ConfigError(Problem("model_sizes", "model.path", why=why, remedy=remedy))
