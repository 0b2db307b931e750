"""Masked sums, means and whitening: hand-worked, blind to what is off the mask, bad input."""

import math

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    check_finite,
    masked_mean,
    masked_sum,
    masked_whiten,
)

VALUES = torch.tensor([[1.0, math.nan, 3.0], [8.0, math.inf, -math.inf]])
MASK = torch.tensor([[True, False, True], [True, False, False]])


def test_hand_worked():
    # 1, 3, 8: sum 12, mean 4
    assert masked_sum(VALUES, MASK).item() == 12.0
    assert masked_mean(VALUES, MASK).item() == 4.0


def test_whiten_hand_worked():
    # -1, 1, 5, 7 in two rows have mean 3 and variance (16 + 4 + 4 + 16) / 4 = 10
    values = torch.tensor([[-1.0, 1.0, math.nan], [5.0, math.nan, 7.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    scale = math.sqrt(10)
    expected = torch.tensor([[-4 / scale, -2 / scale, 0.0], [2 / scale, 0.0, 4 / scale]])
    torch.testing.assert_close(masked_whiten(values, mask), expected)


def test_whiten_against_float64():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 11, generator=generator) * 3 + 100
    mask = torch.rand(7, 11, generator=generator) < 0.6
    kept = values[mask].tolist()
    mean = math.fsum(kept) / len(kept)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / len(kept))
    expected = torch.tensor([(x - mean) / std for x in kept])
    torch.testing.assert_close(masked_whiten(values, mask)[mask], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [1, 3, 999])
@pytest.mark.parametrize("value", [0.7, -3.1, 12345.678])
def test_equal_values_whiten_to_zero(kept, value):
    """Whatever their mean rounds to: off by 1e-3, values of 1e4 would otherwise become about 1."""
    mask = torch.arange(1000) < kept
    assert masked_whiten(torch.full((1000,), value), mask).tolist() == [0.0] * 1000


def test_gradient_is_zero_off_the_mask_even_at_nan():
    values = VALUES.clone().requires_grad_()
    masked_sum(values, MASK).backward()
    assert torch.equal(values.grad, MASK.float())


def test_whiten_gradcheck():
    values = torch.tensor([0.3, -1.0, 2.0, 0.9], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda x: masked_whiten(x, mask), (values,))


def test_bfloat16_is_summed_in_float32():
    # In bfloat16 256 + 1 is 256: a sum of 512 ones would stop there.
    ones = torch.ones(512, dtype=torch.bfloat16)
    total = masked_sum(ones, torch.ones(512, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total.item() == 512.0


def test_sum_over_nothing_is_zero():
    assert masked_sum(VALUES, torch.zeros_like(MASK)).item() == 0.0
    assert masked_sum(torch.empty(0), torch.empty(0, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("function", [masked_mean, masked_whiten])
def test_no_moment_over_nothing(function):
    with pytest.raises(ValueError, match="true nowhere"):
        function(VALUES, torch.zeros_like(MASK))


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_whiten])
@pytest.mark.parametrize(
    ("mask", "names"),
    [(MASK[:1], r"\(2, 3\).*\(1, 3\)"), (MASK.int(), "bool"), (MASK.float(), "bool")],
)
def test_bad_masks_are_named(function, mask: Tensor, names: str):
    with pytest.raises(ValueError, match=names):
        function(VALUES, mask)


def test_what_is_not_finite_on_the_mask_is_named():
    check_finite("here", MASK, values=VALUES)
    with pytest.raises(ValueError, match=r"here needs finite b; 3 of 6 .* nan, at \[0, 1\]"):
        check_finite("here", torch.ones_like(MASK), a=torch.zeros(2, 3), b=VALUES)
