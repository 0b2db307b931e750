"""The recipe as composed from conf/, typed and resolved, without looking at this machine."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from hybridrl.config.given import given_keys
from hybridrl.config.load import examine
from hybridrl.config.machine import Machine, Node
from hybridrl.config.schema import RunConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
MACHINE = Machine((Node("here", cores=4, memory_bytes=64 * 2**30),))
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def run_config(*overrides: str) -> RunConfig:
    """The gsm8k_ppo recipe on CPU with `overrides`."""
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose("config", overrides=["+recipe=gsm8k_ppo", "hardware=cpu", *overrides])
    examined = examine(cfg, machine=MACHINE, read_model=lambda _: MODEL, given=given_keys([], []))
    return examined.config
