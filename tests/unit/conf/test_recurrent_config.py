"""Recurrent layers: what is refused by name, and that the package has a model of them."""

import pytest

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.models.resolve import read_model_config
from tests.support.composing import GPU_NODE, TINY, made, mistakes

HYBRID = TINY | {
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 4096,
}
MISTAKES = """
recurrent_parts fsdp.ulysses_size fsdp.ulysses_size=2 fsdp.compile=false | a state
compiled_recurrence fsdp.compile fsdp.compile=true
shared_prefixes fsdp.share_prefixes fsdp.share_prefixes=true fsdp.compile=false
"""
REPLAY = """
recurrent_replay rollout.router_replay fsdp.compile=false rollout.router_replay=record
"""
SHARING = """
compiled_sharing fsdp.compile fsdp.compile=true
"""
SHARED_KEYS = TINY | {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "max_position_embeddings": 4096,
    "hidden_size_per_layer_input": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
}
EXPERTS = {
    "model_type": "qwen3_next",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
}


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_recurrent_layers_do_not_allow_is_refused(mistake):
    assert made(mistake, "hardware=gpu", model=HYBRID, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize("mistake", mistakes(REPLAY))
def test_what_recurrent_mixtures_do_not_allow_is_refused(mistake):
    assert made(mistake, "hardware=gpu", model=HYBRID | EXPERTS, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize("mistake", mistakes(SHARING))
def test_what_layers_that_share_keys_do_not_allow_is_refused(mistake):
    assert made(mistake, "hardware=gpu", model=SHARED_KEYS, machine=GPU_NODE) == [mistake]


def test_the_embedded_hybrid_is_recurrent():
    shape = model_shape(read_model_config("embedded_hybrid"))
    assert shape.recurrent
    assert [shape.kinds[kind].recurrent for kind in shape.order] == [True, False, True]
    assert not model_shape(read_model_config("embedded")).recurrent
