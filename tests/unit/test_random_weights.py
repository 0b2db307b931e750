"""Weights drawn from nothing: their distribution, and that seed and name alone decide them.

Vectors start as transformers' own modules do.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.distributed.forward.exact import share_operations
from hybridrl.distributed.weights import RandomWeights, first_vectors
from tests.support.tiny_hf import ALL

CPU = torch.device("cpu")


def test_matrices_are_normal_and_vectors_constant():
    matrix_name, norm_name = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    shapes = {matrix_name: torch.Size((300, 400)), norm_name: torch.Size((8,))}
    drawn = RandomWeights(shapes, 0.02, 1, CPU, {norm_name: torch.ones(8)})
    matrix = drawn[matrix_name]
    # 120,000 draws: the mean is within 5 standard errors of 0, the deviation within 1 % of 0.02.
    assert abs(float(matrix.mean())) < 5 * 0.02 / math.sqrt(120_000)
    assert 0.0198 < float(matrix.std()) < 0.0202
    assert matrix.dtype == torch.float32
    assert (drawn[norm_name] == 1).all()


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [("qwen2", False), ("qwen2", True), ("gemma3", True), ("granite", False), ("mixtral", False)],
)
def test_vectors_start_as_transformers_own(name, is_exact):
    """Norms that multiply by 1 + weight start with 0, biases with 0, other norms with 1."""
    own = AutoModelForCausalLM.from_config(ALL[name])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(ALL[name])
    if is_exact:
        share_operations(empty, 2)
    shapes = {n: p.shape for n, p in empty.named_parameters()}
    vectors = first_vectors(empty, shapes, 1)
    assert vectors.keys() == {n for n, p in own.named_parameters() if p.dim() == 1}
    for parameter, value in vectors.items():
        assert (own.get_parameter(parameter) == value).all(), parameter


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_decays_of_states_start_with_numbers_of_their_own(name):
    """As transformers draws or lists them, a function of the seed."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(ALL[name])
    shapes = {n: p.shape for n, p in empty.named_parameters()}
    first, again, other = (first_vectors(empty, shapes, seed) for seed in (1, 1, 2))
    (decays,) = (n for n in first if n.endswith("A_log"))
    assert len(first[decays].unique()) == len(first[decays]) > 1
    assert all(torch.equal(first[n], again[n]) for n in first)
    drawn = {n.rpartition(".")[2] for n in first if not torch.equal(first[n], other[n])}
    assert drawn == {"A_log" if name == "qwen3_5" else "dt_bias"}


def test_the_same_seed_and_name_give_the_same_numbers_in_any_order():
    shapes = dict.fromkeys("ab", torch.Size((4, 5)))
    first = RandomWeights(shapes, 1.0, 7, CPU, {})
    a, b = first["a"], first["b"]
    second = RandomWeights(shapes, 1.0, 7, CPU, {})
    assert torch.equal(second["b"], b)
    assert torch.equal(second["a"], a)
    assert not torch.equal(a, b)
    assert not torch.equal(RandomWeights(shapes, 1.0, 8, CPU, {})["a"], a)
