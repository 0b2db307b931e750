"""Tiny random Hugging Face folders: Llama, Qwen2 (tied, with biases) and Qwen3."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

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


def tiny_model(name: str, attention: str = "sdpa") -> PreTrainedModel:
    """A model of CONFIGS with random weights, biases and norms included; float32, CPU."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model


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
        name: of CONFIGS.
        folder: where it is written.
        num_labels: of its head.
        sizes: keys of its config.json that are not those of CONFIGS.
    """
    config = copy.deepcopy(CONFIGS[name])
    config.update(sizes | {"num_labels": num_labels})
    torch.manual_seed(sum(map(ord, name)) + 1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return folder
