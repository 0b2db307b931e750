"""lora: the group composes, bad adapters are refused by name, idle keys are told what to type."""

import json

import pytest
import torch
from composing import QWEN, TINY, examined, problems
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.config.model_shape import model_shape

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_the_default_adapts_every_linear_layer_of_actor_and_reference():
    result = examined(["hardware=cpu", "lora=default"])
    assert result.report.problems == []
    assert result.config.lora.rank == 16
    assert result.config.lora.target_modules == ALL
    assert result.config.actor.lora == result.config.ref.lora == result.config.lora


def test_without_the_group_there_are_no_adapters():
    assert examined(["hardware=cpu"]).config.actor.lora.rank == 0


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lora.target_modules=[q_prj,v_proj]", "q_prj, which is no linear layer of the decoder. "),
        ("lora.target_modules=[q_prj,v_proj]", "Did you mean q_proj?"),
        ("lora.target_modules=[lm_head]", "names lm_head, which is no linear layer"),
        ("lora.target_modules=[]", "lora.target_modules = [], expected names of linear layers"),
        ("lora.rank=33", "lora.rank = 33, expected at most 32, the smaller side of k_proj"),
        ("lora.rank=-1", "lora.rank = -1, expected at least 0"),
        ("lora.alpha=0", "lora.alpha = 0.0, expected above 0"),
        ("+lora.dropout=0.1", "lora.dropout = 0.1: unknown key"),
        ("lora.rank=four", "lora.rank = four, expected an integer"),
        ("++actor.lora.rank=4", "actor.lora is a copy of the shared lora: rank=4 (shared: 16)"),
    ],
)
def test_what_does_not_fit_is_refused(override, expected):
    """One head of keys and values: k_proj has 128 / 4 = 32 outputs."""
    one_head = TINY | {"num_key_value_heads": 1}
    (problem,) = problems("hardware=cpu", "lora=default", override, model=one_head)
    assert expected in problem


def test_a_rank_may_be_as_large_as_the_smallest_adapted_layer():
    overrides = ("hardware=gpu", "lora=default", "lora.target_modules=[q_proj]", "lora.rank=896")
    assert not [p for p in problems(*overrides, model=QWEN) if "lora" in p]


def test_settings_of_adapters_that_there_are_not_are_refused():
    (problem,) = problems("hardware=cpu", "lora.alpha=8")
    assert problem.startswith("lora.alpha is set but has no effect with lora.rank = 0")
    assert "set lora=default" in problem
    assert not problems("hardware=cpu", "lora.alpha=8", "lora.rank=4")


def test_the_reference_has_no_chunks_of_its_own_where_it_is_the_actors_model():
    (problem,) = problems("hardware=cpu", "lora=default", "ref.log_prob_chunk_tokens=64")
    assert "ref.log_prob_chunk_tokens is set but has no effect with lora.rank = 16" in problem
    assert "set actor.log_prob_chunk_tokens" in problem
