"""Straight-through KL forms: the base's value bit for bit, the gradient of k2, that of the KL."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.losses import (
    MAX_LOG_RATIO,
    estimate_kl,
    kl_penalty,
    kl_penalty_rewards,
)
from hybridrl.config.choices import KLEstimator

k1, k2, k3, k1_straight_through, k3_straight_through = (
    partial(estimate_kl, estimator=estimator) for estimator in KLEstimator
)
FORMS = [(k1_straight_through, k1), (k3_straight_through, k3)]
LOG_Q = torch.tensor([0.25, 0.25, 0.1, 0.4], dtype=torch.float64).log()


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probs from nearly equal to far apart, on either side."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(60, generator=generator, dtype=torch.float64) * 5
    difference = torch.randn(60, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.arange(-9, 3, dtype=torch.float64).repeat_interleave(5)
    return log_probs.to(dtype), (log_probs + difference * scale).to(dtype)


@pytest.mark.parametrize(("form", "base"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_the_bases_bit_for_bit(form, base, dtype):
    log_p, log_q = samples(dtype)
    assert torch.equal(form(log_p, log_q), base(log_p, log_q))
    assert torch.equal(form(log_p.requires_grad_(), log_q), base(log_p, log_q))


@pytest.mark.parametrize(("form", "base"), FORMS)
def test_the_gradient_is_that_of_k2_on_both_sides(form, base):
    log_p, log_q = (x.requires_grad_() for x in samples(torch.float64))
    weights = torch.linspace(-1, 2, len(log_p), dtype=torch.float64)
    ours = torch.autograd.grad((weights * form(log_p, log_q)).sum(), (log_p, log_q))
    right = torch.autograd.grad((weights * k2(log_p, log_q)).sum(), (log_p, log_q))
    own = torch.autograd.grad((weights * base(log_p, log_q)).sum(), (log_p, log_q))
    assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(ours, own, strict=True))


@pytest.mark.parametrize("form", [form for form, _ in FORMS])
def test_the_expected_gradient_is_that_of_the_kl(form):
    """By enumeration of a categorical's tokens, against autograd through the exact KL(p || q)."""
    logits = torch.tensor([0.3, -0.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - LOG_Q)).sum(), logits, retain_graph=True)[0]
    # Tokens are drawn with p, through which no gradient flows.
    estimate = (log_p.exp().detach() * form(log_p, LOG_Q)).sum()
    found = torch.autograd.grad(estimate, logits)[0]
    assert exact.abs().max() > 0.05
    torch.testing.assert_close(found, exact, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("form", ["k1_straight_through", "k3_straight_through"])
def test_the_penalty_has_the_gradient_of_k2_on_the_mask_and_none_off_it(form):
    log_p, log_q = samples(torch.float64)
    mask = torch.arange(len(log_p)) % 3 != 1
    log_p, log_q = (x.masked_fill(~mask, math.nan) for x in (log_p, log_q))
    gradients = []
    for estimator in (KLEstimator(form), KLEstimator.k2):
        inputs = log_p.clone().requires_grad_()
        values, _ = kl_penalty(inputs, log_q, mask, coef=0.3, estimator=estimator)
        gradients.append(torch.autograd.grad(values.sum(), inputs)[0])
    assert torch.equal(*gradients)
    assert (gradients[0][~mask] == 0).all() and gradients[0][mask].any()


def test_k3s_value_is_bounded_but_its_gradient_still_pulls():
    log_p = torch.tensor([-100.0], requires_grad=True)
    found = k3_straight_through(log_p, torch.tensor([0.0]))
    found.sum().backward()
    assert found.item() == pytest.approx(math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO, rel=1e-6)
    assert log_p.grad.item() == -100.0


def test_in_the_reward_they_are_their_bases():
    scores = torch.zeros(4, dtype=torch.float64)
    log_p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    for form, base in (("k1_straight_through", "k1"), ("k3_straight_through", "k3")):
        ours = kl_penalty_rewards(scores, log_p, LOG_Q, 0.1, KLEstimator(form))
        assert torch.equal(ours, kl_penalty_rewards(scores, log_p, LOG_Q, 0.1, KLEstimator(base)))
