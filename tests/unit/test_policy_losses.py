"""Every policy loss and its gradient against its formula in Python floats, and what all must hold.

Some methods stop the gradient inside of their value, so value and gradient are checked apart.
"""

import math

import pytest
import torch

from hybridrl.algorithms import covariance_losses, policy_losses
from hybridrl.algorithms.masked import MAX_LOG_RATIO
from tests.support.policy_loss_references import CLIP, LENGTHS, LOSSES, arguments, expected

EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)
# Those whose value has the gradient that is descended.
DIFFERENTIATED = ("ppo_clip", "dual_clip", "sapo", "kl_cov")


@EVERY_LOSS
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_are_those_of_the_formula(name, seed, dtype):
    taken = arguments(name, dtype, seed)
    log_probs = taken[0].requires_grad_()
    values, _ = LOSSES[name][0](*taken)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    losses, slopes = expected(name, [tensor.detach() for tensor in taken])
    tolerance = 2e-5 if dtype is torch.float32 else 1e-12
    assert values.dtype == gradient.dtype == dtype
    assert values.tolist() == pytest.approx(losses, rel=tolerance, abs=tolerance)
    assert gradient.tolist() == pytest.approx(slopes, rel=tolerance, abs=tolerance)


@EVERY_LOSS
def test_the_cases_reach_both_sides_of_every_bound(name):
    """Else the comparison with the formula would not see a bound that is missing."""
    slopes = [s for seed in range(3) for s in expected(name, arguments(name, seed=seed))[1]]
    fractions = [
        float(LOSSES[name][0](*arguments(name, seed=seed)).sums["clip_fraction"])
        for seed in range(3)
    ]
    assert any(slopes)
    assert 0 < sum(fractions) < 3 * sum(LENGTHS) or name == "sapo"


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradcheck_away_from_the_kinks(name):
    log_probs, *rest = arguments(name)
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[name][0](x, *rest).values, (log_probs.requires_grad_(),), eps=1e-7
    )


@EVERY_LOSS
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name):
    """grad = -A: before the first update of a step all methods agree."""
    taken = arguments(name)
    taken[1] = taken[0].detach().clone()
    log_probs = taken[0].requires_grad_()
    values, sums = LOSSES[name][0](*taken)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    plain = -taken[2].masked_fill(~taken[3], 0.0)
    if name == "clip_cov":
        plain = plain.masked_fill(taken[4], 0.0)
    torch.testing.assert_close(gradient, plain)
    assert sums["approx_kl"] == 0.0
    assert sums["ratio"] == taken[3].sum()


@EVERY_LOSS
def test_what_stands_off_the_mask_changes_nothing(name):
    results = []
    for filler in (0.0, math.nan, math.inf):
        taken = arguments(name)
        mask = taken[3]
        for index in range(3):
            taken[index] = taken[index].masked_fill(~mask, filler)
        log_probs = taken[0].requires_grad_()
        values, sums = LOSSES[name][0](*taken)
        (gradient,) = torch.autograd.grad(values.sum(), log_probs)
        results.append((values.detach(), gradient, sums))
        assert not values[~mask].any() and not gradient[~mask].any()
    for values, gradient, sums in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(gradient, results[0][1])
        assert sums == results[0][2]


@EVERY_LOSS
def test_responses_do_not_depend_on_what_they_are_packed_with(name):
    taken = arguments(name)
    whole, sums = LOSSES[name][0](*taken)
    parts, totals = [], dict.fromkeys(sums, 0.0)
    for rows in zip(*(tensor.split(LENGTHS) for tensor in taken), strict=True):
        rows = list(rows)
        if name == "gspo":
            rows[4] = rows[4] - rows[4][0]
        values, part_sums = LOSSES[name][0](*rows)
        parts.append(values)
        totals = {key: totals[key] + float(part_sums[key]) for key in totals}
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-14)
    assert totals == pytest.approx({key: float(value) for key, value in sums.items()})


@EVERY_LOSS
def test_scaling_advantages_scales_the_loss(name):
    taken = arguments(name)
    once = LOSSES[name][0](*taken).values
    taken[2] = 3 * taken[2]
    thrice = LOSSES[name][0](*taken).values
    if name == "kl_cov":  # but for the penalty
        taken[2] = 0 * taken[2]
        penalty = LOSSES[name][0](*taken).values
        once, thrice = once - penalty, thrice - penalty
    torch.testing.assert_close(thrice, 3 * once)


@EVERY_LOSS
def test_no_response_token_gives_zeros(name):
    taken = [
        tensor.masked_fill(torch.ones(sum(LENGTHS)).bool(), math.nan)
        for tensor in arguments(name)[:3]
    ]
    taken += [torch.zeros(sum(LENGTHS), dtype=torch.bool), *arguments(name)[4:]]
    log_probs = taken[0].requires_grad_()
    values, sums = LOSSES[name][0](*taken)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    assert not values.any() and not gradient.any()
    assert {float(value) for value in sums.values()} == {0.0}


@EVERY_LOSS
def test_a_huge_ratio_stays_finite(name):
    taken = arguments(name, torch.float32)
    taken[0] = torch.zeros_like(taken[0]) - 1e-6
    taken[1] = torch.full_like(taken[1], -200.0)
    log_probs = taken[0].requires_grad_()
    values, sums = LOSSES[name][0](*taken)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert values.abs().max() <= 1.01 * math.exp(MAX_LOG_RATIO) * (taken[2].abs().max() + 1)
    assert all(value.isfinite() for value in sums.values())


@EVERY_LOSS
def test_metrics_carry_no_graph(name):
    taken = arguments(name)
    taken[0].requires_grad_()
    values, sums = LOSSES[name][0](*taken)
    assert values.requires_grad
    assert not any(value.requires_grad for value in sums.values())


@EVERY_LOSS
def test_bad_tensors_are_named(name):
    taken = arguments(name)
    short = [*taken[:3], taken[3][:-1], *taken[4:]]
    with pytest.raises(ValueError, match=r"\(25,\).*\(24,\)"):
        LOSSES[name][0](*short)
    with pytest.raises(ValueError, match="bool"):
        LOSSES[name][0](*taken[:3], taken[3].float(), *taken[4:])


def test_dual_clip_hand_worked():
    # A = -1, r = 4: ppo_clip has 4, dual_clip stops at max_ratio = 3; r = 2: both have 2
    ratio, advantages = torch.tensor([4.0, 2.0]), torch.tensor([-1.0, -1.0])
    values, sums = policy_losses.dual_clip(
        ratio.log(), torch.zeros(2), advantages, torch.ones(2).bool(), **CLIP, max_ratio=3.0
    )
    assert values.tolist() == pytest.approx([3.0, 2.0])
    assert sums["clip_fraction"] == 1


def test_gspo_has_one_ratio_for_a_response():
    # log ratios ln 2 and ln 8 have the mean ln 4: s = 4, and with A = -1 nothing is clipped
    log_probs = torch.tensor([2.0, 8.0, 1.0]).log().requires_grad_()
    values, _ = policy_losses.gspo(
        log_probs,
        torch.zeros(3),
        torch.tensor([-1.0, -1.0, 5.0]),
        torch.ones(3).bool(),
        torch.tensor([0, 0, 1]),
        clip_low=0.2,
        clip_high=0.2,
    )
    assert values.tolist() == pytest.approx([4.0, 4.0, -5.0])
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([4.0, 4.0, -5.0])


def test_gspo_by_token_is_gspo_by_sequence_where_advantages_are_one_per_response():
    """With sequence_mean: J = 1/G sum_i min(s_i A_i, clip(s_i) A_i), equation 5 differentiated."""
    taken = arguments("gspo")
    taken[3] = torch.ones_like(taken[3])
    sequence, lengths = taken[4], torch.tensor(LENGTHS)
    taken[2] = taken[2][: len(LENGTHS)][sequence]
    log_probs = taken[0].requires_grad_()
    values, _ = policy_losses.gspo(*taken, clip_low=0.1, clip_high=0.1)
    (by_token,) = torch.autograd.grad((values / lengths[sequence]).sum() / 5, log_probs)
    again = taken[0].detach().clone().requires_grad_()
    mean = torch.stack([part.mean() for part in (again - taken[1]).split(LENGTHS)])
    advantages = torch.stack([part[0] for part in taken[2].split(LENGTHS)])
    surrogate = torch.minimum(mean.exp() * advantages, mean.exp().clamp(0.9, 1.1) * advantages)
    (by_sequence,) = torch.autograd.grad(-surrogate.mean(), again)
    torch.testing.assert_close(by_token, by_sequence)


def test_sapo_is_symmetric_around_ratio_one_and_closes_faster_for_negative_advantages():
    slopes = []
    for advantage in (1.0, -1.0):
        for ratio in (0.4, 1.6):
            log_probs = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
            values, _ = policy_losses.sapo(
                log_probs,
                torch.zeros(1, dtype=torch.float64),
                torch.tensor([advantage], dtype=torch.float64),
                torch.ones(1).bool(),
                tau_positive=1.0,
                tau_negative=2.0,
            )
            (slope,) = torch.autograd.grad(values.sum(), log_probs)
            slopes.append(abs(float(slope)) / ratio)  # by the ratio, not its logarithm
    up_low, up_high, down_low, down_high = slopes
    assert up_low == pytest.approx(up_high) and down_low == pytest.approx(down_high)
    assert down_low < up_low < 1


def test_settings_out_of_range_are_named():
    x, mask = torch.zeros(2), torch.ones(2).bool()
    cases = [
        (policy_losses.ppo_clip, {"clip_low": 0.0, "clip_high": 0.2}, "clip_low=0"),
        (policy_losses.cispo, {"clip_low": 1.1, "clip_high": 0.2}, "clip_low=1.1"),
        (policy_losses.dual_clip, {**CLIP, "max_ratio": 1.2}, "max_ratio=1.2"),
        (policy_losses.sapo, {"tau_positive": 0.0, "tau_negative": 1.0}, "tau_positive=0"),
        (policy_losses.dppo_tv, {"max_divergence": 1.0, "max_ratio": 2.0}, "divergence=1"),
        (policy_losses.dppo_kl, {"max_divergence": 0.0, "max_ratio": 2.0}, "divergence=0"),
        (policy_losses.dppo_kl, {"max_divergence": 0.1, "max_ratio": 0.5}, "max_ratio=0.5"),
    ]
    for function, settings, words in cases:
        with pytest.raises(ValueError, match=words):
            function(x, x, x, mask, **settings)
    with pytest.raises(ValueError, match="coef=-1"):
        covariance_losses.kl_cov(x, x, x, mask, mask, coef=-1.0)
