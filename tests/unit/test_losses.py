"""The losses' shared promises: hand-worked, against the formula, gradients, masks, splitting."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.clipped_losses import ppo_clip
from hybridrl.algorithms.kl import MAX_LOG_RATIO
from hybridrl.algorithms.losses import (
    entropy_bonus,
    kl_penalty,
    log_ratio_max,
    mean_over,
    ratio_max,
    value_loss,
)
from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.config.choices import KLEstimator

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def mean_of(function: Callable[..., TokenLoss], **settings) -> Loss:
    """A loss of tokens as the mean over a count, as `value_loss` is one."""

    def loss(*tensors: Tensor, num_tokens: float | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, sums = function(*tensors, **settings)
        assert values.shape == tensors[0].shape
        assert not values[~tensors[-1]].any()
        return mean_over(num_tokens, values, tensors[-1]), sums

    return loss


policy_loss = mean_of(ppo_clip, clip_low=0.2, clip_high=0.2)
# loss, number of token tensors before the mask
LOSSES: dict[str, tuple[Loss, int]] = {
    "policy": (policy_loss, 3),
    "value": (partial(value_loss, value_clip=0.2), 3),
    "entropy": (mean_of(entropy_bonus, coef=0.1), 1),
    "kl_k1": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k1), 2),
    "kl_k2": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k2), 2),
    "kl_k3": (mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k3), 2),
    "kl_k1_straight_through": (
        mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k1_straight_through),
        2,
    ),
    "kl_k3_straight_through": (
        mean_of(kl_penalty, coef=0.1, estimator=KLEstimator.k3_straight_through),
        2,
    ),
}
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)


def tokens(name: str, size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    count = LOSSES[name][1]
    return [0.5 * torch.randn(size, generator=generator, dtype=dtype) for _ in range(count)]


def mask_of_two_thirds(size: int) -> Tensor:
    return torch.arange(size) % 3 != 1


def all_true(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def test_policy_loss_hand_worked():
    # eps = .2; min(ratio A, clip(ratio) A), clipped where marked:
    # (1, +2) -> 2   (1.5, +2) -> 2.4*   (1.5, -1) -> -1.5   (.5, +1) -> .5   (.5, -1) -> -.8*
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, 2.0, -1.0, 1.0, -1.0])
    loss, sums = policy_loss(ratio.log(), torch.zeros(5), advantages, all_true(5), num_tokens=10)
    assert loss.item() == pytest.approx(-(2 + 2.4 - 1.5 + 0.5 - 0.8) / 10, abs=1e-6)
    assert sums["clip_fraction"].item() == 2.0
    assert sums["ratio"].item() == pytest.approx(5.0, abs=1e-6)
    # r - 1 - ln r: 0, twice .5 - ln 1.5, twice -.5 + ln 2
    expected = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2))
    assert sums["approx_kl"].item() == pytest.approx(expected, abs=1e-6)


def test_policy_gradient_at_ratio_one_is_minus_advantage_over_the_count():
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0, 0.5])
    loss, _ = policy_loss(log_probs, log_probs.detach(), advantages, all_true(3), num_tokens=4)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -advantages / 4)


def test_clipped_tokens_have_no_gradient():
    log_probs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, sums = policy_loss(log_probs, torch.zeros(4), advantages, all_true(4), num_tokens=1)
    loss.backward()
    assert (log_probs.grad == 0).tolist() == [True, False, False, True]
    assert sums["clip_fraction"].item() == 2.0


def test_a_huge_ratio_gives_no_nan():
    log_probs = torch.tensor([0.0, 0.0, -200.0], requires_grad=True)
    advantages = torch.tensor([0.0, -1.0, 1.0])
    loss, sums = policy_loss(
        log_probs,
        torch.tensor([-200.0, -200.0, 0.0]),
        advantages,
        all_true(3),
        num_tokens=1,
    )
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(torch.isfinite(value) for value in sums.values())


def test_value_loss_hand_worked():
    # c = .2, old 0, return 1: v = .1 -> .81; v = .5 -> max(.25, (.2 - 1)^2 = .64)* ;
    # v = -.5 -> max(2.25, 1.44) = 2.25; halved and over 5
    values = torch.tensor([0.1, 0.5, -0.5])
    loss, sums = value_loss(
        values, torch.zeros(3), torch.ones(3), all_true(3), value_clip=0.2, num_tokens=5
    )
    assert loss.item() == pytest.approx((0.81 + 0.64 + 2.25) / 2 / 5, abs=1e-6)
    assert sums["value_clip_fraction"].item() == 1.0
    assert sums["value_error"].item() == pytest.approx(0.81 + 0.25 + 2.25, abs=1e-6)


def test_value_loss_gradient_is_the_error_unless_clipped():
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    loss, _ = value_loss(
        values, torch.zeros(3), torch.ones(3), all_true(3), value_clip=0.2, num_tokens=1
    )
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, -1.5]))


def test_infinite_value_clip_is_half_the_squared_error():
    values, old, returns = tokens("value", 20)
    loss, sums = value_loss(values, old, returns, all_true(20), value_clip=math.inf, num_tokens=20)
    torch.testing.assert_close(loss, 0.5 * torch.nn.functional.mse_loss(values, returns))
    assert sums["value_clip_fraction"].item() == 0.0


def test_entropy_loss_hand_worked():
    entropy = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss, sums = LOSSES["entropy"][0](entropy, mask, num_tokens=8)
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * 4 / 8)
    assert sums["entropy"].item() == 4.0
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.0125, 0.0, -0.0125]))


def test_kl_loss_hand_worked():
    # d = (1, -1): k2 sums to 1
    values, sums = kl_penalty(
        torch.tensor([-1.0, -3.0]),
        torch.tensor([-2.0, -2.0]),
        all_true(2),
        coef=0.5,
        estimator=KLEstimator.k2,
    )
    assert values.tolist() == pytest.approx([0.25, 0.25])
    assert sums["kl_loss"].item() == pytest.approx(1.0)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits, retain_graph=True)[0]


def test_which_kl_each_estimator_descends():
    """Expected gradients by enumerating a categorical, against those of the exact divergences."""
    logits = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, dim=0)
    log_q = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64), dim=0)
    right, other = gradient(kl(log_p, log_q), logits), gradient(kl(log_q, log_p), logits)
    expected = {"k1": torch.zeros(4, dtype=torch.float64), "k2": right, "k3": other}
    for name, exact in expected.items():
        total = torch.zeros(4, dtype=torch.float64)
        for token, probability in enumerate(log_p.exp().tolist()):
            log_p = torch.log_softmax(logits, dim=0)
            values, _ = kl_penalty(
                log_p[token : token + 1],
                log_q[token : token + 1],
                all_true(1),
                coef=1.0,
                estimator=KLEstimator(name),
            )
            total += probability * gradient(values.sum(), logits)
        torch.testing.assert_close(total, exact, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(right, other, rtol=0.1)


def reference(name: str, fields: list[float]) -> float:
    """One token's loss before the division, from the formulas, in Python floats."""
    if name == "policy":
        log_prob, old, advantage = fields
        ratio = math.exp(log_prob - old)
        return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    if name == "value":
        value, old, target = fields
        inside = min(max(value, old - 0.2), old + 0.2)
        return 0.5 * max((value - target) ** 2, (inside - target) ** 2)
    if name == "entropy":
        return -0.1 * fields[0]
    d = fields[0] - fields[1]
    base = name.removesuffix("_straight_through")
    return 0.1 * {"kl_k1": d, "kl_k2": d * d / 2, "kl_k3": math.exp(-d) - 1 + d}[base]


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
    loss, sums = LOSSES[name][0](*fields, ~all_true(4), num_tokens=torch.tensor(0))
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


@EVERY_LOSS
@pytest.mark.parametrize("num_tokens", [0, -3.0, math.nan, torch.ones(2)])
def test_a_count_that_is_none_is_refused(name, num_tokens):
    with pytest.raises(ValueError, match="num_tokens"):
        LOSSES[name][0](*tokens(name, 6), all_true(6), num_tokens=num_tokens)


def test_hyperparameters_out_of_range_are_named():
    x, mask = torch.zeros(2), all_true(2)
    with pytest.raises(ValueError, match="clip_low=0"):
        ppo_clip(x, x, x, mask, clip_low=0.0, clip_high=0.2)
    with pytest.raises(ValueError, match="value_clip=-1"):
        value_loss(x, x, x, mask, value_clip=-1.0, num_tokens=2)
    with pytest.raises(ValueError, match="coef=-1"):
        entropy_bonus(x, mask, coef=-1.0)
    with pytest.raises(ValueError, match="coef=nan"):
        kl_penalty(x, x, mask, coef=math.nan, estimator=KLEstimator.k1)


def test_count_as_tensor_equals_count_as_number():
    values, mask = torch.arange(4.0), all_true(4)
    assert mean_over(torch.tensor(8), values, mask).item() == 0.75
    assert mean_over(torch.tensor([8.0]), values, mask).shape == ()
    assert mean_over(8, values, mask).item() == 0.75


def test_log_ratio_max_ignores_what_is_off_the_mask():
    log_probs = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    largest = log_ratio_max(log_probs, torch.tensor([-1.25, 0.0, -1.0]), mask)
    assert largest.item() == 1.0
    assert not largest.requires_grad
    assert log_ratio_max(log_probs, log_probs, mask).item() == 0.0
    assert log_ratio_max(log_probs, log_probs, ~all_true(3)).item() == 0.0
    assert log_ratio_max(torch.empty(0), torch.empty(0), all_true(0)).item() == 0.0


def test_ratio_max_is_that_of_the_masked_tokens_and_at_least_one():
    old = torch.tensor([-1.0, -2.0, -3.0])
    log_probs = old + torch.tensor([math.log(2.0), math.nan, -1.0])
    mask = torch.tensor([True, False, True])
    assert ratio_max(log_probs, old, mask).item() == pytest.approx(2.0)
    assert ratio_max(old - 1.0, old, all_true(3)).item() == 1.0
    assert ratio_max(torch.empty(0), torch.empty(0), all_true(0)).item() == 1.0
