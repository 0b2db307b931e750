"""lora: the group composes, bad adapters are refused by name, idle keys are told what to type."""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.config.planner.flops import attention_flops, training_flops
from hybridrl.config.planner.machine import GIB
from hybridrl.config.planner.memory import pinned_bytes, rank_phases
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.plan.tables import plan
from tests.support.composing import (
    GPU_NODE,
    LAPTOP,
    QWEN,
    TINY,
    examined,
    made,
    mistakes,
    problems,
)
from tests.support.tiny_hf import MORE

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_the_default_adapts_every_linear_layer_of_actor_and_reference():
    result = examined(["hardware=cpu", "lora=default"])
    assert result.report.problems == []
    assert result.config.lora.rank == 16
    assert result.config.lora.target_modules == ALL
    assert result.config.actor.lora == result.config.ref.lora == result.config.lora


def test_the_default_follows_the_family():
    model = TINY | {"model_type": "phi3", "pad_token_id": 0}
    result = examined(["hardware=cpu", "lora=default"], model=model)
    assert result.report.problems == []
    assert result.config.actor.lora.target_modules == [
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "down_proj",
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan(result.config, result.shape, LAPTOP))
    assert "phi3: activation memory of compiled layers unknown" in console.export_text()


def test_memory_of_adapters_is_worked_by_hand():
    """Qwen2.5-0.5B on 8 GPUs, r = 16, N tokens: 24 layers of hidden 896, MLP 4864, 14 + 2 heads.

    r (in + out): q and o 2 x 1792, k and v 2 x 1024, gate, up and down 3 x 5760.
    """
    config = examined(["hardware=gpu", "lora=default"], machine=GPU_NODE).config
    phases = {p.name: p.parts for p in rank_phases(config, model_shape(QWEN), 140 * GIB)}
    adapters = 24 * 16 * (2 * 1792 + 2 * 1024 + 3 * 5760)
    update = phases["update actor"]
    assert update["actor weights"] == 4 * (494_032_768 + adapters) // 8
    assert update["actor AdamW"] == 8 * adapters // 8
    assert update["gradient of the head"] == 0
    assert "ref weights" not in update
    plain = examined(["hardware=gpu", "lora=none"], machine=GPU_NODE).config
    all_of_it = {p.name: p.total for p in rank_phases(plain, model_shape(QWEN), 140 * GIB)}
    assert sum(update.values()) < all_of_it["update actor"] - 11 * 494_032_768 // 8


def test_pinned_memory_counts_moments_of_adapters_alone():
    overrides = ["hardware=gpu", "fsdp.offload=idle_optimizer", "algorithm=grpo"]
    adapted = examined([*overrides, "lora=default"], machine=GPU_NODE).config
    adapters = 24 * 16 * (2 * 1792 + 2 * 1024 + 3 * 5760)
    mib = 2**20
    assert pinned_bytes(adapted, model_shape(QWEN)) == -(-adapters // mib) * mib


def test_frozen_weights_have_no_gradients_to_compute():
    """4 N + 6 L h S per token, N = 494,032,768; 6 x 24 x 896 x 1000 = 129,024,000."""
    shape = model_shape(QWEN)
    attention = 4 * attention_flops(shape, 1000)
    found = training_flops(shape, 4000, attention, trains_all=False)
    assert found == pytest.approx(4000 * (4 * 494_032_768 + 129_024_000))


def test_the_plan_names_what_is_trained_and_shared():
    result = examined(["hardware=cpu", "lora=default"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan(result.config, result.shape, LAPTOP))
    text = console.export_text()
    assert "adapters of rank 16, their gradients and AdamW's moments" in text
    assert "nothing more: the actor's weights without adapters" in text


def test_without_the_group_there_are_no_adapters():
    result = examined(["hardware=cpu"])
    assert result.report.problems == []
    assert result.config.lora is result.config.actor.lora is result.config.ref.lora is None


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_layers_and_their_sizes_are_those_of_the_real_model(config_class):
    config = config_class(
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=101,
        head_dim=16,
    )
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).model.layers
    found = {
        name.rpartition(".")[2]: (module.out_features, module.in_features)
        for name, module in layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert model_shape(json.loads(config.to_json_string())).linear_layers == found


MISTAKES = """
adapted_layers lora.target_modules lora.target_modules=[q_prj,v_proj] \
    | q_prj is not a linear layer | Did you mean q_proj?
adapted_layers lora.target_modules lora.target_modules=[lm_head] | lm_head is not a linear layer
adapted_layers lora.target_modules lora.target_modules=[] | at least one linear layer
adapter_rank lora.rank lora.rank=33 | at most 32, the smaller dimension of k_proj
range lora.rank lora.rank=0 | at least 1
range lora.alpha lora.alpha=0 | above 0
unknown_key lora.dropout +lora.dropout=0.1
type lora.rank lora.rank=four
copy actor.lora ++actor.lora.rank=4
no_effect ref.log_prob_chunk_tokens ref.log_prob_chunk_tokens=64 | set actor.log_prob_chunk_tokens
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_does_not_fit_is_refused(mistake):
    """One head of keys and values: k_proj has 128 / 4 = 32 outputs."""
    one_head = TINY | {"num_key_value_heads": 1}
    assert made(mistake, "hardware=cpu", "lora=default", model=one_head) == [mistake]


@pytest.mark.parametrize(
    ("family", "layer", "why"),
    [
        ("nemotron_h", "out_proj", "peft loads no adapter on this layer of Mamba-2"),
        ("deepseek_v3", "kv_b_proj", "vLLM multiplies it into other weights"),
    ],
)
def test_layers_of_a_family_that_get_no_adapters_are_refused_with_the_reason(family, layer, why):
    model = json.loads(MORE[family].to_json_string())
    overrides = ("hardware=cpu", "lora=default")
    (found,) = [
        p
        for p in problems(*overrides, f"lora.target_modules=[{layer}]", model=model)
        if "lora.target_modules" in p
    ]
    assert why in found
    default = [p for p in problems(*overrides, model=model) if "lora.target_modules" in p]
    assert default == []


def test_a_rank_may_be_as_large_as_the_smallest_adapted_layer():
    overrides = ("hardware=gpu", "lora=default", "lora.target_modules=[q_proj]", "lora.rank=896")
    assert not [p for p in problems(*overrides, model=QWEN) if "lora" in p]
