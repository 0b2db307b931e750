"""Weights drawn from nothing: their distribution, and that seed and name alone decide them."""

import math

import torch

from hybridrl.distributed.weights import RandomWeights

CPU = torch.device("cpu")


def test_matrices_are_normal_norms_one_and_biases_zero():
    draw = RandomWeights(0.02, 1, CPU)
    matrix = draw("model.layers.0.mlp.down_proj.weight", torch.Size((300, 400)))
    # 120,000 draws: the mean is within 5 standard errors of 0, the deviation within 1 % of 0.02.
    assert abs(float(matrix.mean())) < 5 * 0.02 / math.sqrt(120_000)
    assert 0.0198 < float(matrix.std()) < 0.0202
    assert matrix.dtype == torch.float32
    assert (draw("model.norm.weight", torch.Size((8,))) == 1).all()
    assert (draw("model.layers.0.self_attn.q_proj.bias", torch.Size((8,))) == 0).all()


def test_the_same_seed_and_name_give_the_same_numbers_in_any_order():
    shape = torch.Size((4, 5))
    first = RandomWeights(1.0, 7, CPU)
    a, b = first("a", shape), first("b", shape)
    second = RandomWeights(1.0, 7, CPU)
    assert torch.equal(second("b", shape), b)
    assert torch.equal(second("a", shape), a)
    assert not torch.equal(a, b)
    assert not torch.equal(RandomWeights(1.0, 8, CPU)("a", shape), a)
