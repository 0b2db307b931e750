"""Sizes and parameter counts of a decoder, from its config.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.config.annotations import LARGEST_COUNT
from hybridrl.config.errors import ConfigError, Problem, shown
from hybridrl.config.planner.families import Family, HeadNorm, family_of, largest_position

# Mandatory keys of config.json.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# Sizes above 0; the last three may be absent or null.
SIZES = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")


class ExpertShape(NamedTuple):
    """Sizes of a mixture of experts, the same in every decoder layer.

    Attributes:
        number: experts of a layer.
        active: experts that a token passes.
        inner: intermediate size of an expert.
        shared: intermediate size of the expert that all tokens pass; 0: there is none.
    """

    number: int
    active: int
    inner: int
    shared: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        family: what config.json does not say of it.
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocab: as in config.json.
        tied: true if lm_head is the embedding.
        biased: linear layers with biases.
        window, windowed: visible tokens in layers with a sliding window; the number of these.
        max_positions: longest sequence in tokens; None if config.json has none.
        experts: mixture of experts in place of the MLP, if any.
    """

    family: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    biased: tuple[str, ...]
    window: int | None
    windowed: int
    max_positions: int | None
    experts: ExpertShape | None = None

    @property
    def untested(self) -> str:
        """Parts that were not run, or are not known, of the family; empty if there are none."""
        parts = "; ".join(self.family.untested)
        return parts and f"{self.family.kind}: {parts}"

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding; an untied lm_head has as many again."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        return self._outside_experts + self._expert * (self.experts.number if self.experts else 0)

    @property
    def _expert(self) -> int:
        """Elements of one expert."""
        return 3 * self.hidden * self.experts.inner if self.experts else 0

    @property
    def _outside_experts(self) -> int:
        """Elements of one decoder layer without its experts that only some tokens pass."""
        layers = self.linear_layers
        weights = sum(outputs * inputs for outputs, inputs in layers.values())
        biases = sum(layers[name][0] for name in self.biased)
        heads = {HeadNorm.none: 0, HeadNorm.each: 2, HeadNorm.whole: self.heads + self.kv_heads}
        head_norms = heads[self.family.head_norm] * self.head_dim
        router = 0
        if self.experts:
            router = self.hidden * (self.experts.number + 3 * self.experts.shared)
            router += self.hidden * (self.experts.shared > 0)  # its gate
        return weights + biases + head_norms + self.family.norms * self.hidden + router

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a decoder layer, by name."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.intermediate
        sides = {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "qkv_proj": (q + 2 * kv, h),
            "o_proj": (h, q),
            "gate_proj": (inner, h),
            "up_proj": (inner, h),
            "gate_up_proj": (2 * inner, h),
            "down_proj": (h, inner),
        }
        return {name: sides[name] for name in self.family.linear_layers}

    def adapter_parameters(self, rank: int, target_modules: Sequence[str]) -> int:
        """Return the elements of one decoder layer's adapters, A and B of each adapted weight."""
        layers = self.linear_layers.items()
        return sum(rank * sum(sides) for name, sides in layers if name in target_modules)

    def attended(self, length: float) -> float:
        """Return twice the mean number of visible tokens of a sequence, over all layers."""
        seen = length
        if self.window is not None and length > self.window:
            seen = 2 * self.window - self.window**2 / length
        return (self.layers - self.windowed) * length + self.windowed * seen

    @property
    def parameters(self) -> int:
        """Elements of the causal language model, a tied lm_head counted once."""
        return self.backbone_parameters + (0 if self.tied else self.embedding_parameters)

    @property
    def active_parameters(self) -> int:
        """Elements that a token passes: all but those of experts that it is not routed to."""
        idle = self.experts.number - self.experts.active if self.experts else 0
        return self.parameters - self.layers * idle * self._expert

    @property
    def tp_widths(self) -> dict[str, int]:
        """Sizes that tensor parallelism splits in the MLP, by name."""
        if not self.experts:
            return {"intermediate size": self.intermediate}
        widths = {"intermediate size of an expert": self.experts.inner}
        if self.experts.shared:
            widths["intermediate size of the shared expert"] = self.experts.shared
        return widths

    @property
    def backbone_parameters(self) -> int:
        """Elements without lm_head."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.hidden


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a config.json's model.

    Raises:
        ConfigError: unsupported architecture, quantized weights, or missing or wrong keys.
    """
    family = family_of(config)
    expert_keys = family.experts.keys(config) if family.experts else ()
    missing = [key for key in (*REQUIRED, *expert_keys) if config.get(key) is None]
    if missing:
        raise ConfigError(
            Problem("model_lacks", "model.path", why=f"config.json lacks {', '.join(missing)}")
        )
    sizes: dict[str, Any] = {key: config.get(key) for key in (*SIZES, *expert_keys)}
    sizes["max_position_embeddings"] = largest_position(config)
    window = family.window and config.get("sliding_window", family.window.default)
    if window is not None:
        sizes["sliding_window"] = window
    wrong = [
        f"{key} = {shown(repr(size))}, expected an integer above 0"
        for key, size in sizes.items()
        if size is not None and (type(size) is not int or not 0 < size <= LARGEST_COUNT)
    ]
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        wrong.append(f"rms_norm_eps = {shown(repr(eps))}, expected a number of at least 0")
    # Absent keys have the defaults of transformers' configurations.
    if not wrong:
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        kv_heads = sizes["num_key_value_heads"] or heads
        head_dim = sizes["head_dim"] or family.head_dim or hidden / heads
        if heads % kv_heads or head_dim % 1:
            named = ("hidden_size", "num_attention_heads", "num_key_value_heads")
            wrong = [", ".join(f"{key} = {sizes[key]}" for key in named) + " do not divide"]
    experts = None
    if not wrong and family.experts:
        number, inner, active, *shared = (sizes[key] for key in expert_keys)
        experts = ExpertShape(number, active, inner, shared[0] if shared else 0)
        if active > number:
            wrong = [f"num_experts_per_tok = {active} is more than {expert_keys[0]} = {number}"]
    if wrong:
        why = f"config.json is wrong: {'; '.join(wrong)}"
        remedy = "Copy the config.json that belongs to the weights"
        raise ConfigError(Problem("model_sizes", "model.path", why=why, remedy=remedy))
    return ModelShape(
        family=family,
        hidden=hidden,
        intermediate=sizes["intermediate_size"],
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(head_dim),
        vocab=sizes["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        biased=family.biased
        + tuple(
            name for key, names in family.bias_keys if config.get(key, False) for name in names
        ),
        window=window,
        windowed=_windowed(family, config, sizes["num_hidden_layers"]) if window else 0,
        max_positions=sizes["max_position_embeddings"],
        experts=experts,
    )


def _windowed(family: Family, config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers with a sliding window."""
    assert family.window is not None
    kinds, pattern = config.get("layer_types"), config.get("sliding_window_pattern")
    if isinstance(kinds, list):
        return min(layers, kinds.count("sliding_attention"))
    if family.window.full_every is None:
        return layers
    full_every = pattern if type(pattern) is int and pattern > 0 else family.window.full_every
    return layers - layers // full_every
