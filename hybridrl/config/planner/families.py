"""Facts of model families by name: what was run, and what vLLM's models compute otherwise.

No family needs to be here: what a model computes is derived from transformers' classes
(distributed/description.py). docs/models.md says what is asked of one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hybridrl.config.errors import ABSENT, ConfigError, Problem

# Families of which compiled layers' activations were measured; that ran on GPUs; on CPUs alone.
MEASURED = ("llama", "qwen2", "qwen3")
ON_GPUS = (
    *MEASURED,
    *("mistral", "phi3", "olmo2", "olmo3", "granite", "smollm3", "gemma3_text"),
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "qwen3_5_text"),
)
ON_CPUS = (
    *("ministral3", "exaone4", "glm4", "stablelm", "seed_oss", "nemotron"),
    *("qwen3_5_moe_text", "qwen3_next", "lfm2", "nemotron_h"),
    *("glm4_moe_lite", "deepseek_v3", "gemma4_text"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3"),
)
# Families that take images: a language model, below it what makes its states of an image, and the
# type of the language model where config.json names none.
VISION = {kind: f"{kind}_text" for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")}
VISION |= {"mistral3": "mistral"}
# Keys of config.json with tokens that stand for images and videos, or around them.
PLACEHOLDERS = re.compile(r"(image|video|vision)(_start|_end)?_token_(id|index)")
# Families of which rollout.exact shares every operation with vLLM, and the kind of their norms in
# exact_kernels.py.
EXACT = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), 0) | {"gemma3_text": 2}
_TEXT_MODEL = (
    "transformers' AutoModelForCausalLM.from_pretrained('MODEL').save_pretrained('FOLDER') writes "
    "one, to which the tokenizer's files are copied"
)
# Families that people try whose classes do not show what is wrong.
REFUSED = {
    "cohere2": "vLLM's model has windows that are one token longer",
    "gemma3": "only its text models (gemma3_text) are trained, not images",
    "qwen3_5_moe": f"only its text models (qwen3_5_moe_text) are trained: {_TEXT_MODEL}",
    "gemma4": "only its text models (gemma4_text) are trained, not images and sounds",
}


class Setting(NamedTuple):
    """Setting of config.json that is refused if it is true: key, why, families; (): of any."""

    key: str
    why: str
    kinds: tuple[str, ...] = ()


# transformers 5.19 loses experts where it saves them in the format of the quantized model.
_TO_BFLOAT16 = (
    "python -c \"import transformers as t; path, out = 'MODEL', 'FOLDER'; "
    "t.AutoTokenizer.from_pretrained(path).save_pretrained(out); "
    "t.AutoModelForCausalLM.from_pretrained(path, dtype='bfloat16', "
    "quantization_config=t.Mxfp4Config(dequantize=True))"
    '.save_pretrained(out, save_original_format=False)"'
)
# Settings of gpt-oss that vLLM's model does not read.
_OF_GPT_OSS = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_LATENT = ("glm4_moe_lite", "deepseek_v3")
_WITHOUT_BIAS = ("qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *_LATENT)
_NO_WINDOW = "vLLM's model attends to all tokens"
REFUSED_SETTINGS = (
    Setting("attn_logit_softcapping", "packed attention does not cap its scores"),
    Setting("use_bidirectional_attention", "attention here is causal"),
    Setting(
        "attention_bias", "vLLM's model leaves the bias of o_proj out", ("qwen3", "qwen3_vl_text")
    ),
    Setting("attention_bias", "vLLM's model leaves biases out", _WITHOUT_BIAS),
    Setting("use_sliding_window", _NO_WINDOW, ("qwen3_moe", "qwen2_moe")),
    Setting("sliding_window", _NO_WINDOW, ("mixtral", "olmoe")),
    Setting("router_jitter_noise", "equal tokens must have equal log-probs"),
    Setting("norm_topk_prob", "vLLM's model does not normalise the weights of experts", ("olmoe",)),
    Setting("clip_qkv", "vLLM's model does not clip queries, keys and values"),
    Setting("qk_layernorm", "vLLM's model has no norms of heads", ("stablelm",)),
    Setting("use_parallel_residual", "vLLM's model computes MLPs after attention", ("stablelm",)),
)

# Linear layers that get no adapters; of those beside experts docs/models.md tells.
UNADAPTED = (
    Setting("kv_b_proj", "vLLM multiplies it into other weights"),
    Setting("out_proj", "peft loads no adapter on this layer of Mamba-2", ("nemotron_h",)),
)


class Needed(NamedTuple):
    """Setting of config.json that must have one of some values: key, values, why, families."""

    key: str
    values: tuple[object, ...]
    why: str
    kinds: tuple[str, ...]


# None: the key may be absent.
NEEDED = (
    Needed("qkv_bias", (True, None), "vLLM's model has these biases", ("qwen2_moe",)),
    Needed("scoring_func", ("sigmoid",), "vLLM's routers compute a softmax", ("deepseek_v3",)),
    Needed("topk_method", ("noaux_tc",), "vLLM's routers have no offsets", ("deepseek_v3",)),
    Needed("moe_layer_freq", (1, None), "transformers' model ignores it", _LATENT),
    Needed("rope_interleave", (True, None), "vLLM's model rotates pairs of neighbours", _LATENT),
)


def untested(kind: str, *, has_experts: bool) -> str:
    """Return what was not run of a family, or is not known; empty if there is nothing."""
    if kind in MEASURED:
        return ""
    bound = "a bound" if has_experts else "counted as Llama's"
    parts = [f"activation memory of compiled layers unknown, {bound}"]
    if kind not in ON_GPUS:
        parts.insert(0, "not run on GPUs" if kind in ON_CPUS else "no test has run it")
    return f"{kind}: {'; '.join(parts)}"


def unsupported(config: Mapping[str, object], why: str) -> Problem:
    """Return the problem of a model whose computation is not supported."""
    expected = (
        f"a decoder with layers of the kinds that those of {', '.join((*ON_GPUS, *ON_CPUS))} have"
    )
    brings_code = " Code of a model (auto_map) is never run." * ("auto_map" in config)
    why = f"it has type {config.get('model_type')}, and {why}.{brings_code}"
    return Problem("family", "model.path", ABSENT, expected, why)


def setting_problem(key: str, value: object, expected: str, why: str) -> Problem:
    """Return the problem of a setting of config.json that is not supported."""
    remedy = "Set model.path to another model"
    return Problem(
        "model_setting", key, value, expected, f"{why} (config.json of model.path)", remedy
    )


def check_settings(config: Mapping[str, Any]) -> None:
    """Check what config.json alone shows of a model.

    Raises:
        ConfigError: no family, a refused one, quantized weights, or an unsupported setting.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(unsupported(config, "a type is a word"))
    if kind in REFUSED:
        raise ConfigError(unsupported(config, REFUSED[kind]))
    if quantization := config.get("quantization_config"):
        expected, why = "plain weights for training", "it is a quantized model"
        remedy = "Set model.path to the unquantized model"
        if quantization.get("quant_method") == "mxfp4":
            remedy = f"Set model.path to FOLDER, after\n  {_TO_BFLOAT16}"
        raise ConfigError(Problem("quantized", "model.path", ABSENT, expected, why, remedy))
    text = text_part(config)
    for key, value, expected, reason in _unsupported(text, text["model_type"]):
        raise ConfigError(setting_problem(key, value, expected, reason))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the language model: all of it without images."""
    kind = str(config.get("model_type"))
    if kind not in VISION:
        return config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {"model_type": VISION[kind], **text}
    # Qwen2.5-VL's folders on the hub have no such part.
    return {**config, "vision_config": None, "model_type": VISION[kind]}


def placeholder_ids(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that stand for images or videos or around them, which none may sample."""
    if config.get("model_type") not in VISION:
        return []
    named = (value for key, value in config.items() if PLACEHOLDERS.fullmatch(key))
    return sorted({value for value in named if type(value) is int})


def _unsupported(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, object, str, str]]:
    """Yield settings that are not supported: key, value, what is expected, and why."""
    for key, reason, kinds in REFUSED_SETTINGS:
        if config.get(key) and (kind in kinds or not kinds):
            yield key, config[key], "none", reason
    if "dynamic" in rope_types(config):
        why = "frequencies would depend on the longest sequence of a micro-batch"
        yield "rope_type", "dynamic", "another", why
    layers, first = (config.get(k) or 0 for k in ("num_hidden_layers", "max_window_layers"))
    if config.get("use_sliding_window") and 0 < first < layers:
        why = "vLLM's model has a window in all layers or in none"
        yield "max_window_layers", first, f"0 or {layers}", why
    for key, known in _OF_GPT_OSS.items() if kind == "gpt_oss" else ():
        if config.get(key, known) != known:
            yield key, config[key], str(known).lower(), "vLLM's model has no other"
    windows = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if kind == "gpt_oss" and windows != [index % 2 == 0 for index in range(len(windows))]:
        expected = "windows in every other layer, from the first on"
        yield "layer_types", config["layer_types"], expected, "vLLM's model has these"
    mixture = config.get("num_experts") is not None
    if kind == "gemma4_text" and mixture != bool(config.get("enable_moe_block")):
        why = "vLLM's model has experts if num_experts is set"
        yield "enable_moe_block", config.get("enable_moe_block"), str(mixture).lower(), why
    if kind == "lfm2" and config.get("tie_word_embeddings") is False:
        yield "tie_word_embeddings", False, "true", "vLLM's model shares embedding and head"
    for key, values, reason, kinds in NEEDED:
        if kind in kinds and config.get(key) not in values:
            yield key, config.get(key), str(values[0]).lower(), reason
    if kind == "glm4_moe_lite":
        mlps, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
        dense = 1 if mlps is None else mlps.count("dense")
        if first != dense or "dense" in (mlps or ())[dense:]:
            why = "vLLM's model has so many layers without experts, which come first"
            yield "first_k_dense_replace", first, str(dense), why


def not_adapted(kind: str, layer: str) -> str:
    """Return why a linear layer of a family gets no adapters; empty if nothing is known."""
    return next((x.why for x in UNADAPTED if x.key == layer and kind in (x.kinds or [kind])), "")


def partial_rotation(config: Mapping[str, Any]) -> object:
    """Return the part of each head that config.json rotates, if it names one other than 1."""
    named = (rope.get("partial_rotary_factor") for rope in (config, *_ropes(config)))
    return next((part for part in named if part not in (None, 1)), None)


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return the kinds of rotary frequencies that a config.json names."""
    return {
        str(part[key]) for part in _ropes(config) for key in ("rope_type", "type") if key in part
    }


def largest_position(config: Mapping[str, Any]) -> Any:
    """Return config.json's longest sequence, or the one up to which frequencies are the same.

    LongRoPE has two sets of frequencies. transformers chooses by the longest sequence of a
    micro-batch, vLLM by max_model_len. Ministral 3 scales later queries, which vLLM's model does
    not unless another key says so. Of YaRN vLLM has no more than `factor` times the original's.
    """
    longest = config.get("max_position_embeddings")
    for part in _ropes(config):
        factor, first = part.get("factor"), part.get("original_max_position_embeddings")
        if part.get("rope_type", part.get("type")) == "yarn" and longest and factor and first:
            longest = min(longest, int(factor * first))
    scales = any("llama_4_scaling_beta" in part for part in _ropes(config))
    if not scales and not rope_types(config) & {"longrope", "su"}:
        return longest
    key = "original_max_position_embeddings"
    return next((part[key] for part in (*_ropes(config), config) if part.get(key)), longest)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            yield from (part for part in (rope, *rope.values()) if isinstance(part, Mapping))
