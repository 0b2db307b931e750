"""config.json of the models whose shapes benchmarks take, with random weights."""

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


def _qwen2(
    hidden: int,
    heads: int,
    kv_heads: int,
    layers: int,
    intermediate: int,
    vocab: int,
    *,
    tied: bool,
) -> dict[str, Any]:
    return _QWEN2 | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


QWEN2_5 = {
    "0.5b": _qwen2(896, 14, 2, 24, 4864, 151936, tied=True),
    "1.5b": _qwen2(1536, 12, 2, 28, 8960, 151936, tied=True),
    "7b": _qwen2(3584, 28, 4, 28, 18944, 152064, tied=False),
}
# For CPUs: head sizes that vLLM's kernels there take.
TINY = _qwen2(256, 4, 2, 2, 512, 501, tied=False)
