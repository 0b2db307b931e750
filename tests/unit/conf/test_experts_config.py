"""Mixtures of experts: what is refused by name, and what the plan says of them."""

import io
import json

import pytest
from rich.console import Console

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.flops import attention_flops, training_flops
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.plan.tables import plan
from tests.support.composing import GPU_NODE, TINY, examined, made, mistakes, only
from tests.support.tiny_hf import ALL

EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
}
MOE = TINY | EXPERTS | {"model_type": "qwen3_moe"}


def test_flops_count_the_experts_of_a_token():
    """Of 8 experts of 3 x 24 x 128 a token passes 2: six of each of 3 layers are idle."""
    shape = model_shape(MOE)
    idle = 3 * 6 * 3 * 24 * 128
    assert shape.parameters - shape.active_parameters == idle
    attention = attention_flops(shape, 100)
    assert attention == 100 * 2 * 128 * 3 * 100
    found = training_flops(shape, 100, attention)
    assert found == 100 * 6 * shape.active_parameters + 3 * attention


def test_the_plan_names_active_parameters():
    result = examined(["hardware=gpu"], model=MOE, machine=GPU_NODE)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(plan(result.config, result.shape, GPU_NODE))
    text = console.export_text()
    assert f"{result.shape.active_parameters:,} active, 2 of 8 experts" in text
    assert "qwen3_moe: activation memory of compiled layers unknown" in text


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("qwen3_moe", {"attention_bias": True}),
        ("qwen2_moe", {"use_sliding_window": True}),
        ("olmoe", {"norm_topk_prob": True}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("mixtral", {"sliding_window": 4096}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("deepseek_v3", {"scoring_func": None}),
        ("deepseek_v3", {"topk_method": "greedy", "scoring_func": "sigmoid"}),
        ("glm4_moe_lite", {"first_k_dense_replace": 0}),
        ("glm4_moe_lite", {"first_k_dense_replace": 1, "mlp_layer_types": ["sparse", "dense"]}),
        ("glm4_moe_lite", {"rope_interleave": False}),
    ],
)
def test_settings_that_vllm_or_the_trainer_ignores_are_refused(kind, setting):
    key, *_ = setting
    with pytest.raises(ConfigError, match=f"{key} = "):
        model_shape(MOE | {"model_type": kind} | setting)


def test_layers_without_experts_are_layers_of_their_own():
    shape = model_shape(MOE | {"mlp_only_layers": [0]})
    dense, mixture = shape.kinds
    assert shape.order == (0, 1, 1) and dense.experts is None and mixture.experts == shape.experts
    assert dense.linear_layers == mixture.linear_layers  # of attention
    assert set(shape.tp_widths) == {"intermediate size", "intermediate size of an expert"}


def test_the_cache_of_latent_attention_is_one_vector_for_all_heads():
    shape = model_shape(json.loads(ALL["glm4_moe_lite"].to_json_string()))
    assert [kind.latent for kind in shape.kinds] == [16 + 8] * 2
    assert [kind.cached(ranks) for kind in shape.kinds for ranks in (1, 2)] == [24] * 4
    assert [model_shape(MOE).kinds[0].cached(ranks) for ranks in (1, 2)] == [128, 64]


def test_absent_and_impossible_sizes_are_named():
    problem = only("hardware=cpu", model=MOE | {"moe_intermediate_size": None})
    assert problem.id == "model_lacks" and "lacks moe_intermediate_size" in problem.why
    problem = only("hardware=cpu", model=MOE | {"num_experts_per_tok": 9})
    assert problem.id == "model_sizes"
    assert "num_experts_per_tok = 9 is more than num_experts = 8" in problem.why


MISTAKES = """
balance_of_parts actor.router_balance_coef actor.router_balance_coef=0.1 fsdp.ulysses_size=2
no_effect rollout.router_replay rollout.router_replay=record +recipe=gsm8k_sft | no responses
copy actor.router_replay ++actor.router_replay=replay
router_replay rollout.router_replay rollout.router_replay=replay rollout.schedule=partial \
    | schedule = partial
router_replay rollout.router_replay rollout.router_replay=replay environment=calculator \
    | earlier turns
compiled_experts fsdp.compile fsdp.compile=true fsdp.param_dtype=float32
adapted_layers lora.target_modules lora=default lora.target_modules=[gate_proj]
"""
WITHOUT_EXPERTS = """
no_experts actor.router_balance_coef actor.router_balance_coef=0.1
router_replay rollout.router_replay rollout.router_replay=replay | no experts to record
"""
LONG = {"max_position_embeddings": 4096}


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_experts_do_not_allow_is_refused(mistake):
    assert made(mistake, "hardware=gpu", model=MOE | LONG, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize("mistake", mistakes(WITHOUT_EXPERTS))
def test_what_needs_experts_is_refused_without(mistake):
    assert made(mistake, "hardware=gpu", model=TINY | LONG, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize(
    ("size", "model", "ids", "word"),
    [
        (1, TINY, ["no_effect", "expert_parallel"], "equally many of the no experts"),
        (16, MOE, ["engine_ranks", "slices", "expert_parallel"], "equally many of the 8 experts"),
        (16, MOE, ["engine_ranks", "slices", "expert_parallel"], "size of an expert 24"),
    ],
)
def test_engines_hold_equally_many_experts(size, model, ids, word):
    overrides = ["rollout.expert_parallel=true", f"rollout.tensor_parallel_size={size}"]
    found = examined(["hardware=gpu", *overrides], model=model | LONG, machine=GPU_NODE).report
    assert [problem.id for problem in found.problems] == ids
    assert any(word in str(problem) for problem in found.problems)
