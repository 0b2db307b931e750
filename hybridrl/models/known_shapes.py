"""config.json of models whose sizes are known without their files: for plans and benchmarks."""

from typing import Any

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
}
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
# Qwen2.5 (https://arxiv.org/abs/2412.15115, and the models' pages), without rope scaling.
QWEN2_5: dict[str, dict[str, Any]] = {
    name: _QWEN2 | dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "0.5B": (896, 14, 2, 24, 4864, 151936, True),
        "1.5B": (1536, 12, 2, 28, 8960, 151936, True),
        "3B": (2048, 16, 2, 36, 11008, 151936, True),
        "7B": (3584, 28, 4, 28, 18944, 152064, False),
        "14B": (5120, 40, 8, 48, 13824, 152064, False),
        "32B": (5120, 40, 8, 64, 27648, 152064, False),
        "72B": (8192, 64, 8, 80, 29568, 152064, False),
    }.items()
}
# Mixtures of experts: Qwen3-30B-A3B (https://arxiv.org/abs/2505.09388) and OLMoE-1B-7B
# (https://arxiv.org/abs/2409.02060), and their pages.
_MOE: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = _MOE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
}
OLMOE_1B_7B = _MOE | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 16,
    "intermediate_size": 1024,
    "num_experts": 64,
    "norm_topk_prob": False,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}
# By name on the hub.
KNOWN = {
    f"Qwen/Qwen2.5-{size}{kind}": config
    for size, config in QWEN2_5.items()
    for kind in ("", "-Instruct")
} | {"Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B, "allenai/OLMoE-1B-7B-0924": OLMOE_1B_7B}
