"""PPO's loss, value loss, entropy, KL penalty and largest ratios, hand-worked; which KL falls."""

import math

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.losses import kl_penalty, ratio_maxima, value_loss
from hybridrl.algorithms.masked import MAX_LOG_RATIO
from hybridrl.config.choices import KLEstimator
from tests.support.loss_cases import LOSSES, all_true, policy_loss, tokens


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


def log_ratio_max(*tensors: Tensor) -> Tensor:
    return ratio_maxima(*tensors)["log_ratio_max"]


def ratio_max(*tensors: Tensor) -> Tensor:
    return ratio_maxima(*tensors)["ratio_max"]


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
