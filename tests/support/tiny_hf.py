"""Tiny random Hugging Face folders, one or two of each family."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Exaone4Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
)

from hybridrl.distributed.forward.recurrent import pack_recurrences, recurrent_functions

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
}
# Frequencies of LongRoPE for heads of size 8, a half of which is rotated.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3],
    "long_factor": [1.5, 4.0],
    "original_max_position_embeddings": 64,
}
# Frequencies of OLMo 3: of layers with a window, and of others.
YARN = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
    "attention_bias": True,
}
# Of Ministral 3, which scales the queries of later positions.
SCALED_BY_POSITION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
}
# Of gpt-oss; vLLM's model reads each of these.
YARN_OF_ALL = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {"query_pre_attn_scalar": 12, "pad_token_id": 0}
# Of Gemma 4; heads of layers without a window are larger.
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 67,
    "final_logit_softcapping": 2.0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
PARTIAL_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
# Recurrent layers: more heads of values than of keys, and of another size.
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "rope_parameters": PARTIAL_ROPE,
}
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 4,
    "time_step_min": 1e-9,
}
SHARED_EXPERT = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
# Latent attention: sizes of parts of heads, and of what keys and values are made of.
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
# Mixtures after a layer without experts, whose routers have sigmoids.
SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Of DeepSeek-V3: the best two of four groups, and keys that vLLM's model reads alone.
GROUPED = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0}
GROUPED |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
FULL_AND_WINDOW = ["sliding_attention", "full_attention"]
# Families of later times, and their other heads; windows are shorter than the sequences of tests.
MORE = {
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "mistral_tied": MistralConfig(
        **SIZES, head_dim=16, sliding_window=None, tie_word_embeddings=True
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=4, pad_token_id=0),
    "phi3_tied": Phi3Config(
        **SIZES, rope_parameters=LONG_ROPE, pad_token_id=0, tie_word_embeddings=True
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(
        **SIZES, sliding_window=4, layer_types=FULL_AND_WINDOW, rope_parameters=YARN
    ),
    "granite": GraniteConfig(**SIZES, **GRANITE),
    "granite_tied": GraniteConfig(**SIZES, **GRANITE, mlp_bias=True, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0], pad_token_id=0, tie_word_embeddings=True
    ),
    "smollm3_untied": SmolLM3Config(
        **SIZES, no_rope_layers=[0, 1], pad_token_id=0, tie_word_embeddings=False
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, **GEMMA3, head_dim=16, sliding_window=4, layer_types=FULL_AND_WINDOW
    ),
    "gemma3_untied": Gemma3TextConfig(
        **SIZES,
        **GEMMA3,
        head_dim=16,
        sliding_window=4,
        layer_types=FULL_AND_WINDOW,
        tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3_moe_tied": Qwen3MoeConfig(
        **SIZES, **EXPERTS, moe_intermediate_size=24, tie_word_embeddings=True
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, **EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "olmoe": OlmoeConfig(**SIZES, **EXPERTS),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "gemma4_untied": Gemma4TextConfig(
        **SIZES,
        **GEMMA4,
        layer_types=FULL_AND_WINDOW,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    "gemma4_moe": Gemma4TextConfig(
        **SIZES,
        **GEMMA4,
        num_experts=6,
        layer_types=FULL_AND_WINDOW,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    # Layers 2 and 3 take keys and values of 0 and 1, and have wider MLPs.
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **GEMMA4,
        layer_types=FULL_AND_WINDOW * 2,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=4,
        layer_types=FULL_AND_WINDOW,
        rope_parameters=YARN_OF_ALL,
        pad_token_id=0,
    ),
    "ministral3": Ministral3Config(
        **SIZES, head_dim=16, sliding_window=4, rope_parameters=SCALED_BY_POSITION
    ),
    "exaone4": Exaone4Config(**SIZES, sliding_window=4, layer_types=FULL_AND_WINDOW),
    "glm4": Glm4Config(**SIZES, head_dim=16, pad_token_id=0),
    "stablelm": StableLmConfig(**SIZES, use_qkv_bias=True),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=16, attention_out_bias=True),
    "nemotron": NemotronConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5_tied": Qwen3_5TextConfig(**SIZES, **DELTA, tie_word_embeddings=True),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS, **SHARED_EXPERT),
    "qwen3_next": Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS, **SHARED_EXPERT),
    "lfm2": Lfm2Config(
        **SIZES,
        layer_types=["conv", "full_attention"],
        block_multiple_of=16,
        tie_word_embeddings=True,
    ),
    "nemotron_h": NemotronHConfig(
        **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"}, **MAMBA
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **SIZES | LATENT,
        **SIGMOID,
        first_k_dense_replace=1,  # vLLM's key
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | LATENT, **SIGMOID, **GROUPED, rope_parameters=DEEPSEEK_YARN
    ),
}
ALL = CONFIGS | MORE
# The heads of MORE that need not be looked at each time, and families that are layers of others.
OTHER_HEADS = {name for name in MORE if "tied" in name}
SIMILAR = {"exaone4", "glm4", "stablelm", "seed_oss"}
RECURRENT = {"qwen3_5", "qwen3_5_tied", "qwen3_5_moe", "qwen3_next", "lfm2", "nemotron_h"}
# Mixtures whose first layer has no experts.
AFTER_DENSE = ("glm4_moe_lite", "deepseek_v3")


def tiny_model(name: str, attention: str | None = None) -> PreTrainedModel:
    """A model of ALL with random weights, biases and norms included; float32, CPU.

    `attention`: by default transformers' own, "sdpa" where a family has it.
    """
    own = "eager" if ALL[name].model_type == "gpt_oss" else "sdpa"
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(ALL[name]), dtype=torch.float32, attn_implementation=attention or own
    ).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
        spread(model, name)
    return model


@contextmanager
def packed_recurrences(model: PreTrainedModel) -> Iterator[bool]:
    """Within this context, recurrent layers of models of these classes want bounds of sequences."""
    own = [(names, key, names[key]) for names, key in recurrent_functions(model)]
    try:
        yield bool(pack_recurrences(model))
    finally:
        for names, key, function in own:
            names[key] = function


def spread(model: PreTrainedModel, name: str) -> None:
    """Spread a new family's probabilities: with a tied head, each token would predict itself.

    The last norm scales by 0.1 instead of 1, whether or not it adds 1 to its weight. Offsets of
    routers are as large as differences of scores.
    """
    if name in MORE:
        *_, last = (m for m in model.base_model.children() if "Norm" in type(m).__name__)
        last.weight.sub_(0.9)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))


def tiny_folder(name: str, folder: Path) -> Path:
    """The same model as an ordinary folder, with a file where a tokenizer's would be."""
    model = tiny_model(name)
    model.generation_config = GenerationConfig(eos_token_id=1, temperature=0.7, do_sample=True)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return folder


def tiny_reward_model(name: str, folder: Path, *, num_labels: int = 1, **sizes: Any) -> Path:
    """A random checkpoint for sequence classification, whose scores are of the order of 1.

    Args:
        name: of ALL.
        folder: where it is written.
        num_labels: of its head.
        sizes: keys of its config.json that are not those of ALL.
    """
    config = copy.deepcopy(ALL[name])
    config.update(sizes | {"num_labels": num_labels})
    torch.manual_seed(sum(map(ord, name)) + 1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return folder
