"""config.json of the models whose shapes benchmarks take, with random weights.

    python benchmarks/shapes.py 1.5b FOLDER

writes such a model's config.json to FOLDER, with SmolLM2's tokenizer without an end token: a run
with model.path=FOLDER model.init=random then needs no hub, and no response ends early.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridrl.models import known_shapes
from hybridrl.models.resolve import resolve_model

QWEN2_5 = {size: known_shapes.QWEN2_5[size.upper()] for size in ("0.5b", "1.5b", "7b")}
# gpt-oss-20b (https://arxiv.org/abs/2508.10925, and the model's page), in bfloat16.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
SHAPES = QWEN2_5 | {
    "30b-a3b": known_shapes.QWEN3_30B_A3B,
    "olmoe": known_shapes.OLMOE_1B_7B,
    "gpt-oss-20b": GPT_OSS_20B,
}
# For CPUs: head sizes that vLLM's kernels there take.
TINY = known_shapes.QWEN2_5["0.5B"] | {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "vocab_size": 501,
    "tie_word_embeddings": False,
}
TINY_EXPERTS = known_shapes.QWEN3_30B_A3B | {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 501,
}
TINY_GPT_OSS = GPT_OSS_20B | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 8,
    "vocab_size": 501,
}
# Of SmolLM2's tokenizer.
VOCABULARY = 49152
# Names of ends that a tokenizer's files may give a response; without them none ends early.
ENDS = ("eos_token", "eos_token_id")


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write config.json of a shape and SmolLM2's tokenizer without an end token."""
    folder.mkdir(parents=True, exist_ok=True)
    config = shape | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    source = resolve_model("smollm2_135m")
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    kept = {name: value for name, value in tokenizer.items() if name not in ENDS}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2))


if __name__ == "__main__":
    make_model(Path(sys.argv[2]), SHAPES[sys.argv[1]])
