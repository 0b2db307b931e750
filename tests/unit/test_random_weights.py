"""Weights drawn from nothing: their distribution, and that seed and name alone decide them.

Vectors start as transformers' own modules do.
"""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.distributed.weights import RandomWeights, first_vectors
from tests.support.tiny_hf import ALL

CPU = torch.device("cpu")


def test_matrices_are_normal_and_vectors_constant():
    matrix_name, norm_name = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    shapes = {matrix_name: torch.Size((300, 400)), norm_name: torch.Size((8,))}
    drawn = RandomWeights(shapes, 0.02, 1, CPU, {norm_name: 1.0})
    matrix = drawn[matrix_name]
    # 120,000 draws: the mean is within 5 standard errors of 0, the deviation within 1 % of 0.02.
    assert abs(float(matrix.mean())) < 5 * 0.02 / math.sqrt(120_000)
    assert 0.0198 < float(matrix.std()) < 0.0202
    assert matrix.dtype == torch.float32
    assert (drawn[norm_name] == 1).all()


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "granite", "mixtral"])
def test_vectors_start_as_transformers_own(name):
    """Norms that multiply by 1 + weight start with 0, biases with 0, other norms with 1."""
    own = AutoModelForCausalLM.from_config(ALL[name])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(ALL[name])
    vectors = first_vectors(empty, {n: p.shape for n, p in empty.named_parameters()})
    assert vectors.keys() == {n for n, p in own.named_parameters() if p.dim() == 1}
    for parameter, value in vectors.items():
        assert (own.get_parameter(parameter) == value).all(), parameter


def test_the_same_seed_and_name_give_the_same_numbers_in_any_order():
    shapes = dict.fromkeys("ab", torch.Size((4, 5)))
    first = RandomWeights(shapes, 1.0, 7, CPU, {})
    a, b = first["a"], first["b"]
    second = RandomWeights(shapes, 1.0, 7, CPU, {})
    assert torch.equal(second["b"], b)
    assert torch.equal(second["a"], a)
    assert not torch.equal(a, b)
    assert not torch.equal(RandomWeights(shapes, 1.0, 8, CPU, {})["a"], a)
