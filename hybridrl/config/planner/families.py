"""Model families: the only place where one is named. docs/models.md says how to add one.

A record says how a family's decoder differs from Llama's where its config.json does not. Imports
nothing heavy: planner, trainer and rollout read the same records.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hybridrl.config.errors import ConfigError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class HeadNorm(Enum):
    """Norm of queries and keys before attention."""

    none = "none"
    # One weight of a head's size, for all heads.
    each = "each head"


@dataclass(frozen=True)
class Family:
    """Decoders of one model_type; the defaults are Llama's.

    Attributes:
        kind: model_type in config.json.
        classes: prefix of transformers' classes, as in LlamaForCausalLM.
        head_dim: head size if config.json has none; None: hidden_size / num_attention_heads.
        linear_layers: linear layers of a decoder layer, the default targets of LoRA.
        biased: of these, the ones that always have biases.
        bias_keys: keys of config.json that give biases to linear layers.
        head_norm: norm of queries and keys.
    """

    kind: str
    classes: str
    head_dim: int | None = None
    linear_layers: tuple[str, ...] = ATTENTION + MLP
    biased: tuple[str, ...] = ()
    bias_keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    head_norm: HeadNorm = HeadNorm.none


_FAMILIES = (
    Family("llama", "Llama", bias_keys=(("attention_bias", ATTENTION), ("mlp_bias", MLP))),
    Family("qwen2", "Qwen2", biased=("q_proj", "k_proj", "v_proj")),
    Family(
        "qwen3",
        "Qwen3",
        head_dim=128,
        bias_keys=(("attention_bias", ATTENTION),),
        head_norm=HeadNorm.each,
    ),
)
FAMILIES: Mapping[str, Family] = {family.kind: family for family in _FAMILIES}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json's model.

    Raises:
        ConfigError: no supported family, or quantized weights.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        brings_code = " Code of a checkpoint (auto_map) is never run."
        raise ConfigError(
            f"model.path is a model of type {kind}, expected one of {', '.join(FAMILIES)}: "
            f"the reshard into vLLM supports only these.{brings_code * ('auto_map' in config)}"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "model.path is a quantized model, expected plain weights for training.\n"
            "Set model.path to the unquantized model."
        )
    return FAMILIES[kind]
