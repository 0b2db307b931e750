"""The losses' shared promises: against the formula, gradients, masks, splitting, bad input."""

import math

import pytest
import torch

from hybridrl.algorithms.losses import entropy_bonus, kl_penalty, value_loss
from hybridrl.config.choices import KLEstimator
from tests.support.loss_cases import LOSSES, all_true, mask_of_two_thirds, reference, tokens

EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)


@EVERY_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_the_formula_in_python_floats(name, dtype):
    fields, mask = tokens(name, 300, dtype), mask_of_two_thirds(300)
    loss, _ = LOSSES[name][0](*fields, mask, num_tokens=123)
    rows = zip(*(field[mask].tolist() for field in fields), strict=True)
    expected = math.fsum(reference(name, list(row)) for row in rows) / 123
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected, rel=1e-5 if dtype is torch.float32 else 1e-12)


# The straight-through forms have another gradient than their value's (test_kl_straight_through.py).
@pytest.mark.parametrize("name", [name for name in LOSSES if "straight_through" not in name])
def test_gradcheck_away_from_the_kinks(name):
    fields, mask = tokens(name, 12), mask_of_two_thirds(12)
    first = fields[0].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[name][0](x, *fields[1:], mask, num_tokens=5)[0], (first,), eps=1e-7
    )


@EVERY_LOSS
def test_nan_off_the_mask_changes_neither_loss_nor_gradient(name):
    function, mask = LOSSES[name][0], mask_of_two_thirds(30)
    results = []
    for filler in (0.0, math.nan, math.inf):
        fields = [field.masked_fill(~mask, filler) for field in tokens(name, 30)]
        first = fields[0].requires_grad_()
        loss, sums = function(first, *fields[1:], mask, num_tokens=30)
        loss.backward()
        results.append((loss.detach(), first.grad, sums))
    for loss, grad, sums in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])
        assert sums == results[0][2]
    assert (results[0][1][~mask] == 0).all()
    assert (results[0][1][mask] != 0).any()


@EVERY_LOSS
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [13, 0, 27], [1, 39]])
def test_parts_add_up_to_the_whole(name, sizes):
    """Losses, gradients and metric sums do not depend on how tokens fall on micro-batches."""
    function, fields, mask = LOSSES[name][0], tokens(name, 40), mask_of_two_thirds(40)
    whole_input = fields[0].clone().requires_grad_()
    whole, whole_sums = function(whole_input, *fields[1:], mask, num_tokens=int(mask.sum()))
    whole.backward()

    split_input = fields[0].clone().requires_grad_()
    total, totals = 0.0, dict.fromkeys(whole_sums, 0.0)
    parts = [column.split(sizes) for column in (split_input, *fields[1:], mask)]
    for part in zip(*parts, strict=True):
        loss, sums = function(*part, num_tokens=int(mask.sum()))
        loss.backward()
        total += loss.item()
        totals = {key: totals[key] + sums[key].item() for key in totals}
    assert total == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(split_input.grad, whole_input.grad, rtol=1e-12, atol=1e-15)
    assert totals == pytest.approx({key: value.item() for key, value in whole_sums.items()})


@EVERY_LOSS
def test_shape_of_the_token_tensors_does_not_matter(name):
    function, fields, mask = LOSSES[name][0], tokens(name, 12), mask_of_two_thirds(12)
    flat, _ = function(*fields, mask, num_tokens=8)
    square, _ = function(*(field.view(3, 4) for field in fields), mask.view(3, 4), num_tokens=8)
    torch.testing.assert_close(flat, square, rtol=1e-14, atol=0)


@EVERY_LOSS
def test_no_response_token_is_zero_with_zero_gradient(name):
    fields = [torch.full((4,), math.nan, requires_grad=True) for _ in range(LOSSES[name][1])]
    loss, sums = LOSSES[name][0](*fields, ~all_true(4), num_tokens=1)
    loss.backward()
    assert loss.item() == 0.0
    assert fields[0].grad.tolist() == [0.0] * 4
    assert {value.item() for value in sums.values()} == {0.0}


@EVERY_LOSS
def test_metric_sums_carry_no_graph(name):
    fields = [field.requires_grad_() for field in tokens(name, 6)]
    loss, sums = LOSSES[name][0](*fields, all_true(6), num_tokens=6)
    assert loss.requires_grad
    assert not any(value.requires_grad for value in sums.values())


@EVERY_LOSS
def test_bad_tensors_are_named(name):
    function, fields, mask = LOSSES[name][0], tokens(name, 6), all_true(6)
    with pytest.raises(ValueError, match=r"\(6,\).*\(5,\)"):
        function(*fields, mask[:5], num_tokens=6)
    with pytest.raises(ValueError, match="bool"):
        function(*fields, mask.float(), num_tokens=6)


@pytest.mark.parametrize("num_tokens", [0, -3.0, math.nan])
def test_a_count_that_is_none_is_refused(num_tokens):
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens}"):
        LOSSES["value"][0](*tokens("value", 6), all_true(6), num_tokens=num_tokens)


def test_hyperparameters_out_of_range_are_named():
    x, mask = torch.zeros(2), all_true(2)
    with pytest.raises(ValueError, match="value_clip=-1"):
        value_loss(x, x, x, mask, value_clip=-1.0, num_tokens=2)
    with pytest.raises(ValueError, match="coef=-1"):
        entropy_bonus(x, mask, coef=-1.0)
    with pytest.raises(ValueError, match="coef=nan"):
        kl_penalty(x, x, mask, coef=math.nan, estimator=KLEstimator.k1)
