"""Model families: the only place where one is named. docs/models.md says how to add one.

A record says how a family's decoder differs from Llama's where its config.json does not. Imports
nothing heavy: planner, trainer and rollout read the same records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from hybridrl.config.errors import ABSENT, ConfigError, Problem

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# Linear layers of the attention block, whatever the family; others are of the MLP.
IN_ATTENTION = (*ATTENTION, "qkv_proj")
UNKNOWN_MEMORY = ("activation memory of compiled layers unknown, counted as Llama's",)
MOE_UNKNOWN_MEMORY = ("activation memory of compiled layers unknown, a bound",)
CPU_ONLY = ("not run on GPUs", *UNKNOWN_MEMORY)


class HeadNorm(Enum):
    """Norm of queries and keys before attention."""

    none = "none"
    # One weight of a head's size, for all heads.
    each = "each head"
    # A weight for all heads together, which are one vector.
    whole = "whole projection"


class Window(NamedTuple):
    """Sliding window of attention, whose size is config.json's sliding_window.

    Attributes:
        default: size if config.json has none; None: no window.
        full_every: every such layer attends to all tokens if config.json lists no layer_types;
            None: no layer does.
    """

    default: int | None = None
    full_every: int | None = None


class Mixture(NamedTuple):
    """Experts in the MLP of every decoder layer; fields ending in _key are keys of config.json.

    Attributes:
        size_key: intermediate size of an expert.
        norm_key: true if the weights of a token's experts add up to 1; None: they always do.
        shared_key: intermediate size of the expert that sees every token; None: there is none.
        block: name of the MLP in checkpoints; in transformers it is mlp.
        parts: gate, up and down projection of an expert in checkpoints.
    """

    size_key: str = "moe_intermediate_size"
    norm_key: str | None = "norm_topk_prob"
    shared_key: str | None = None
    block: str = "mlp"
    parts: tuple[str, str, str] = MLP

    def keys(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the mandatory keys of config.json; the first is the number of experts."""
        number = "num_local_experts" if "num_local_experts" in config else "num_experts"
        shared = () if self.shared_key is None else (self.shared_key,)
        return (number, self.size_key, "num_experts_per_tok", *shared)


@dataclass(frozen=True)
class Family:
    """Decoders of one model_type; the defaults are Llama's, but for `untested`.

    Attributes:
        kind: model_type in config.json.
        untested: what was not run or is not known; shown by the plan.
        head_dim: head size if config.json has none; None: hidden_size / num_attention_heads.
        tied: default of tie_word_embeddings.
        linear_layers: linear layers of a decoder layer, the default targets of LoRA.
        biased: of these, the ones that always have biases.
        bias_keys: keys of config.json that give biases to linear layers.
        norms: RMSNorms of hidden states in a decoder layer.
        norm_weight: weight of a norm that scales by 1.
        float32_norms: norms multiply by their weight in float32.
        head_norm: norm of queries and keys.
        window: sliding window, if layers may have one.
        logits_divisor: key of config.json by which logits are divided.
        experts: mixture of experts in place of the MLP; its layers are no `linear_layers`.
        refused: settings in config.json that are not supported: key, and why.
    """

    kind: str
    untested: tuple[str, ...] = CPU_ONLY
    head_dim: int | None = None
    tied: bool = False
    linear_layers: tuple[str, ...] = ATTENTION + MLP
    biased: tuple[str, ...] = ()
    bias_keys: tuple[tuple[str, tuple[str, ...]], ...] = ()
    norms: int = 2
    norm_weight: float = 1.0
    float32_norms: bool = False
    head_norm: HeadNorm = HeadNorm.none
    window: Window | None = None
    logits_divisor: str | None = None
    experts: Mixture | None = None
    refused: tuple[tuple[str, str], ...] = ()


_ATTENTION_BIAS = (("attention_bias", ATTENTION),)
_BIAS_KEYS = (*_ATTENTION_BIAS, ("mlp_bias", MLP))
_QKV = ("q_proj", "k_proj", "v_proj")
# vLLM's models with experts ignore these.
_NO_WINDOW = "vLLM's model attends to all tokens"
_DENSE_LAYERS = ("mlp_only_layers", "every layer needs experts")
_BIASES = ("attention_bias", "vLLM's model leaves biases out")
_OLMO2 = Family(
    "olmo2",
    untested=UNKNOWN_MEMORY,
    bias_keys=_ATTENTION_BIAS,
    float32_norms=True,
    head_norm=HeadNorm.whole,
)
_MIXTURE = Family("", untested=MOE_UNKNOWN_MEMORY, linear_layers=ATTENTION)
_FAMILIES = (
    Family("llama", untested=(), bias_keys=_BIAS_KEYS),
    Family("qwen2", untested=(), biased=_QKV),
    Family(
        "qwen3",
        untested=(),
        head_dim=128,
        head_norm=HeadNorm.each,
        refused=(("attention_bias", "vLLM's model leaves the bias of o_proj out"),),
    ),
    Family("mistral", untested=UNKNOWN_MEMORY, window=Window(default=4096)),
    Family("phi3", untested=UNKNOWN_MEMORY, linear_layers=FUSED, window=Window()),
    _OLMO2,
    replace(_OLMO2, kind="olmo3", window=Window(default=4096, full_every=4)),
    Family(
        "granite",
        untested=UNKNOWN_MEMORY,
        bias_keys=_BIAS_KEYS,
        logits_divisor="logits_scaling",
    ),
    Family("smollm3", untested=UNKNOWN_MEMORY, tied=True, bias_keys=_BIAS_KEYS),
    Family(
        "gemma3_text",
        untested=UNKNOWN_MEMORY,
        head_dim=256,
        tied=True,
        bias_keys=_ATTENTION_BIAS,
        norms=4,
        norm_weight=0.0,
        float32_norms=True,
        head_norm=HeadNorm.each,
        window=Window(default=4096, full_every=6),
    ),
    replace(
        _MIXTURE,
        kind="qwen3_moe",
        head_norm=HeadNorm.each,
        experts=Mixture(),
        refused=(_DENSE_LAYERS, _BIASES, ("use_sliding_window", _NO_WINDOW)),
    ),
    replace(
        _MIXTURE,
        kind="qwen2_moe",
        biased=_QKV,
        experts=Mixture(shared_key="shared_expert_intermediate_size"),
        refused=(_DENSE_LAYERS, ("use_sliding_window", _NO_WINDOW)),
    ),
    replace(
        _MIXTURE,
        kind="olmoe",
        head_norm=HeadNorm.whole,
        experts=Mixture(size_key="intermediate_size"),
        refused=(
            _BIASES,
            ("norm_topk_prob", "vLLM's model does not normalise the weights of experts"),
            ("clip_qkv", "vLLM's model does not clip queries, keys and values"),
        ),
    ),
    replace(
        _MIXTURE,
        kind="mixtral",
        experts=Mixture("intermediate_size", None, None, "block_sparse_moe", ("w1", "w3", "w2")),
        refused=(
            ("sliding_window", _NO_WINDOW),
            ("router_jitter_noise", "equal tokens must have equal log-probs"),
        ),
    ),
)
FAMILIES: Mapping[str, Family] = {family.kind: family for family in _FAMILIES}
# Families that people try, and why they are refused.
REFUSED = {
    "gemma2": "attention scores and logits are capped (tanh), which log-probs here are not",
    "gemma3": "only its text models (gemma3_text) are trained, not images",
    "gpt_oss": "its attention has sinks, which packed attention does not compute",
}
# Families of which rollout.exact shares every operation with vLLM.
EXACT = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite", "phi3")
# Families that rotate a part of each head, and those with another activation than silu.
PARTIAL_ROPE = ("phi3",)
OTHER_ACTIVATIONS = ("gemma3_text",)
# Settings of any family that change what is computed, and are not supported: key, and why.
REFUSED_SETTINGS = {
    "attn_logit_softcapping": "packed attention does not cap its scores",
    "final_logit_softcapping": "log-probs are computed without a cap on logits",
    "use_bidirectional_attention": "attention here is causal",
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json's model.

    Raises:
        ConfigError: no supported family, quantized weights, or an unsupported setting.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        brings_code = " Code of a model (auto_map) is never run."
        reason = REFUSED.get(str(kind), "the reshard into vLLM supports only these")
        expected = f"a model of one of the types {', '.join(FAMILIES)}"
        why = f"it has type {kind}, and {reason}.{brings_code * ('auto_map' in config)}"
        raise ConfigError(Problem("family", "model.path", ABSENT, expected, why))
    if config.get("quantization_config"):
        expected, why = "plain weights for training", "it is a quantized model"
        remedy = "Set model.path to the unquantized model"
        raise ConfigError(Problem("quantized", "model.path", ABSENT, expected, why, remedy))
    family = FAMILIES[kind]
    for key, value, expected, reason in _unsupported(config, family):
        why, remedy = f"{reason} (config.json of model.path)", "Set model.path to another model"
        raise ConfigError(Problem("model_setting", key, value, expected, why, remedy))
    return family


def _unsupported(
    config: Mapping[str, Any], family: Family
) -> Iterator[tuple[str, object, str, str]]:
    """Yield settings that are not supported: key, value, what is expected, and why."""
    for key, reason in (REFUSED_SETTINGS | dict(family.refused)).items():
        if config.get(key):
            yield key, config[key], "none", reason
    if family.experts and config.get("decoder_sparse_step", 1) != 1:
        yield "decoder_sparse_step", config["decoder_sparse_step"], "1", "all layers need experts"
    if "dynamic" in rope_types(config):
        why = "frequencies would depend on the longest sequence of a micro-batch"
        yield "rope_type", "dynamic", "another", why
    ropes = [config, *_ropes(config)] if family.kind not in PARTIAL_ROPE else []
    for rotated in (rope.get("partial_rotary_factor") for rope in ropes):
        if rotated not in (None, 1):
            yield "partial_rotary_factor", rotated, "1", "transformers' model rotates whole heads"
    activation = config.get("hidden_act")
    if activation not in (None, "silu") and family.kind not in OTHER_ACTIVATIONS:
        yield "hidden_act", activation, "silu", "vLLM's model has no other"
    layers, first = (config.get(k) or 0 for k in ("num_hidden_layers", "max_window_layers"))
    if config.get("use_sliding_window") and 0 < first < layers:
        why = "vLLM's model has a window in all layers or in none"
        yield "max_window_layers", first, f"0 or {layers}", why
    if family.kind == "qwen2_moe" and config.get("qkv_bias") is False:
        yield "qkv_bias", False, "true", "vLLM's model has these biases"


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the kinds of rotary frequencies that a config.json names."""
    return {
        str(part[key]) for part in _ropes(config) for key in ("rope_type", "type") if key in part
    }


def largest_position(config: Mapping[str, Any]) -> Any:
    """Return config.json's longest sequence, or the one up to which frequencies are the same.

    LongRoPE has two sets of frequencies. transformers chooses by the longest sequence of a
    micro-batch, vLLM by max_model_len.
    """
    longest = config.get("max_position_embeddings")
    if not rope_types(config) & {"longrope", "su"}:
        return longest
    key = "original_max_position_embeddings"
    return next((part[key] for part in (*_ropes(config), config) if part.get(key)), longest)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, Mapping))
