"""A decoder's sizes and parameter counts from its config.json, without building it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.errors import ConfigError

SUPPORTED = ("llama", "qwen2", "qwen3")
# Keys that every config.json of these models has.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama, Qwen2 or Qwen3 decoder.

    Attributes:
        kind: llama | qwen2 | qwen3.
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocab: as in config.json.
        tied: whether lm_head is the embedding.
        attention_bias, mlp_bias: whether these linear layers have biases.
        max_positions: longest sequence in tokens, or None where config.json does not say.
    """

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    max_positions: int | None

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding; an untied lm_head has as many again."""
        return self.vocab * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = h * (q + 2 * kv) + q * h
        if self.kind == "qwen2":
            attention += q + 2 * kv
        elif self.attention_bias:
            attention += q + 2 * kv + h
        if self.kind == "qwen3":
            attention += 2 * self.head_dim  # q_norm and k_norm
        mlp = 3 * h * self.intermediate
        mlp += 2 * self.intermediate + h if self.mlp_bias else 0
        return attention + mlp + 2 * h

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a decoder layer, by name."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.intermediate
        return {
            "q_proj": (q, h),
            "k_proj": (kv, h),
            "v_proj": (kv, h),
            "o_proj": (h, q),
            "gate_proj": (inner, h),
            "up_proj": (inner, h),
            "down_proj": (h, inner),
        }

    def adapter_parameters(self, rank: int, target_modules: Sequence[str]) -> int:
        """Elements of one decoder layer's low-rank factors, A and B of each adapted weight."""
        layers = self.linear_layers.items()
        return sum(rank * sum(sides) for name, sides in layers if name in target_modules)

    @property
    def parameters(self) -> int:
        """Elements of the causal language model, a tied lm_head counted once."""
        return self.backbone_parameters + (0 if self.tied else self.embedding_parameters)

    @property
    def backbone_parameters(self) -> int:
        """Elements without lm_head: what a critic shares with the policy."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.hidden


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape a config.json describes.

    Raises:
        ConfigError: it is of another architecture, quantized, or keys are missing.
    """
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        brings_code = " Code that comes with a checkpoint (auto_map) is never run."
        raise ConfigError(
            f"model.path names a model of type {kind}, expected one of {', '.join(SUPPORTED)}: "
            f"the reshard into vLLM is written for these.{brings_code * ('auto_map' in config)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "model.path names a quantized model; training needs plain weights. "
            "Name the unquantized model."
        )
    missing = [key for key in REQUIRED if not isinstance(config.get(key), int)]
    if missing:
        raise ConfigError(f"model.path names a model whose config.json lacks {', '.join(missing)}.")
    heads = config["num_attention_heads"]
    # Absent keys mean what transformers' own configurations of these models say.
    return ModelShape(
        kind=kind,
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim")
        or (128 if kind == "qwen3" else config["hidden_size"] // heads),
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        max_positions=config.get("max_position_embeddings"),
    )
