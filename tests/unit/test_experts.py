"""Experts: names in checkpoints, the router's arithmetic, and vLLM's backends that are refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.experts import (
    Experts,
    _choice,
    checkpoint_tensors,
    parameter_shapes,
    replace_experts,
)
from hybridrl.distributed.forward.routers import Choice, Router
from hybridrl.distributed.weights import checkpoint_sources
from hybridrl.rollout.vllm.experts import check_experts
from tests.support.tiny_hf import AFTER_DENSE, ALL, tiny_folder, tiny_model

MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss")


@pytest.mark.parametrize("name", MIXTURES + AFTER_DENSE)
def test_names_are_those_that_transformers_saves(name, tmp_path):
    folder = tiny_folder(name, tmp_path / name)
    sources = checkpoint_sources(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {source.name: tuple(source.shape) for source in sources} == saved
    shapes = parameter_shapes(sources)
    hidden = ALL[name].hidden_size
    experts = [s for n, s in shapes.items() if n.endswith("experts.gate_up_proj")]
    # Gate and up of each expert, in one or in two matrices.
    number, layers = (16, 1) if name in AFTER_DENSE else (6 if name == "gpt_oss" else 12, 2)
    assert experts == [(number, experts[0][1], hidden)] * layers


def test_a_checkpoint_tensor_is_one_index_of_its_parameter():
    name = "model.layers.3.mlp.experts.gate_up_proj"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ALL["mixtral"])
    parts = checkpoint_tensors(model, {name: (4, 5, 7)})[name]
    assert [(p.name.rpartition("experts.")[2], p.at) for p in parts] == [
        ("0.w1.weight", (0,)),
        ("0.w3.weight", (1,)),
        ("1.w1.weight", (2,)),
        ("1.w3.weight", (3,)),
    ]
    assert parts[0].name.startswith("model.layers.3.block_sparse_moe.experts.")


def test_logits_are_not_rounded():
    """Logits 256 + 0.5 and 256: bfloat16 has steps of 2 there."""
    weight = nn.Parameter(torch.tensor([[16.0, 0.0], [16.0, 0.5]], dtype=torch.bfloat16))
    states = torch.tensor([[16.0, 1.0]], dtype=torch.bfloat16)
    logits, weights, ids = Router(weight, Choice(1, False))(states)
    assert logits.tolist() == [[256.0, 256.5]] and ids.tolist() == [[1]]
    assert weights.item() == torch.tensor(0.5).sigmoid().to(torch.bfloat16).item()


def test_transposed_experts_with_biases_compute_what_transformers_do():
    """With gate and up in turn, and a clamp that cuts; values and gradients."""
    torch.manual_seed(0)
    config = copy.deepcopy(ALL["gpt_oss"])
    config.swiglu_limit = 0.5
    lm = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    fused = lm.model.layers[0].mlp.experts
    for param in fused.parameters():
        param.data.normal_()
    own = Experts(copy.deepcopy(fused), splits=False)
    for name in ("gate_up_proj", "down_proj"):
        own.get_parameter(name).data.copy_(fused.get_parameter(name).mT)
    states, ids, weights = torch.randn(9, 32), torch.randint(6, (9, 2)), torch.rand(9, 2)
    expected, output = (experts(states, ids, weights) for experts in (fused, own))
    torch.testing.assert_close(output, expected)
    expected.sin().sum().backward()
    output.sin().sum().backward()
    for name, param in fused.named_parameters():
        grad = own.get_parameter(name).grad
        torch.testing.assert_close(grad.mT if param.dim() == 3 else grad, param.grad)


@pytest.mark.parametrize("name", MIXTURES + AFTER_DENSE)
def test_a_router_chooses_and_weighs_as_that_of_transformers(name):
    theirs, ours = tiny_model(name), tiny_model(name)
    replace_experts(ours)
    named = [dict(model.named_modules()) for model in (theirs, ours)]
    name = "router" if name == "gpt_oss" else "gate"
    gates = [modules[f"model.layers.1.mlp.{name}"] for modules in named]
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    _, expected, chosen = gates[0](states)
    _, weights, ids = gates[1](states[None])
    places = [one.argsort(-1) for one in (chosen, ids)]
    assert torch.equal(chosen.gather(1, places[0]), ids.gather(1, places[1]))
    torch.testing.assert_close(expected.gather(1, places[0]), weights.gather(1, places[1]))
    probs, _, _ = gates[1].seen
    torch.testing.assert_close(probs.sum(-1), torch.ones(50))


def test_a_router_of_another_kind_is_refused():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 8))

        def forward(self, states):
            scores = torch.nn.functional.softplus(states @ self.weight.T)
            return (scores, *scores.topk(2))

    with pytest.raises(ConfigError, match=r"its routers \(Gate\) choose and weigh"):
        _choice(Gate(), {})


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"unquantized_backend": SimpleNamespace(name="FLASHINFER_CUTLASS")}, "FLASHINFER_CUTLASS"),
        ({}, "SimpleNamespace"),
    ],
)
def test_a_backend_that_changes_the_layout_is_refused_by_name(method, named):
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.w13_weight = nn.Parameter(torch.zeros(1))
    model.experts.quant_method = SimpleNamespace(**method)
    with pytest.raises(ConfigError, match=f"computes experts with {named}, expected TRITON"):
        check_experts(model)
    model.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))
    check_experts(model)
