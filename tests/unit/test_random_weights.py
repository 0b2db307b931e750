"""Weights drawn from nothing: their distribution, and that seed and name alone decide them."""

import math

import torch

from hybridrl.distributed.weights import RandomWeights

CPU = torch.device("cpu")


def test_matrices_are_normal_norms_one_and_biases_zero():
    matrix_name, norm_name = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
    bias_name = "model.layers.0.self_attn.q_proj.bias"
    vector = torch.Size((8,))
    shapes = {matrix_name: torch.Size((300, 400)), norm_name: vector, bias_name: vector}
    drawn = RandomWeights(shapes, 0.02, 1, CPU)
    matrix = drawn[matrix_name]
    # 120,000 draws: the mean is within 5 standard errors of 0, the deviation within 1 % of 0.02.
    assert abs(float(matrix.mean())) < 5 * 0.02 / math.sqrt(120_000)
    assert 0.0198 < float(matrix.std()) < 0.0202
    assert matrix.dtype == torch.float32
    assert (drawn[norm_name] == 1).all()
    assert (drawn[bias_name] == 0).all()


def test_the_same_seed_and_name_give_the_same_numbers_in_any_order():
    shapes = dict.fromkeys("ab", torch.Size((4, 5)))
    first = RandomWeights(shapes, 1.0, 7, CPU)
    a, b = first["a"], first["b"]
    second = RandomWeights(shapes, 1.0, 7, CPU)
    assert torch.equal(second["b"], b)
    assert torch.equal(second["a"], a)
    assert not torch.equal(a, b)
    assert not torch.equal(RandomWeights(shapes, 1.0, 8, CPU)["a"], a)
