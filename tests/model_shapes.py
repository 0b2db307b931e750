"""Shapes of models that tests reckon with; nothing of that size is built."""

from typing import Any

from hybridrl.config.planner.model_shape import ModelShape, model_shape

# config.json of Qwen2.5-0.5B-Instruct, as far as the checks read it.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QWEN_7B = QWEN | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
# The order of size of the embedded model.
TINY = QWEN | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 65,
    "max_position_embeddings": 256,
}
# A reward model of that size; the same file passes as a policy's.
REWARD_MODEL = TINY | {
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}
QWEN_1_5B: ModelShape = model_shape(
    QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
    }
)
