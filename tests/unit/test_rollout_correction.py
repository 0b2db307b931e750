"""Importance weights of trainer over sampler: hand-worked, by enumeration, and edges."""

import math

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.masked import MAX_LOG_RATIO
from hybridrl.algorithms.rollout_correction import (
    correction_weights,
    importance_ratios,
    mismatch_from,
    mismatch_sums,
)
from hybridrl.config.choices import CorrectionLevel, CorrectionMethod

LOG2 = math.log(2.0)
# rho = 2, 1/2 and 4 on the first response (the last token is no response token), 8 on the second
DIFFERENCES = torch.tensor([[LOG2, -LOG2, 2 * LOG2, 50.0], [3 * LOG2, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])


def ratios(level: CorrectionLevel) -> torch.Tensor:
    return importance_ratios(DIFFERENCES - 1.0, torch.full((2, 4), -1.0), MASK, level)


@pytest.mark.parametrize(
    ("level", "first", "second"),
    [
        (CorrectionLevel.token, [2.0, 0.5, 4.0], 8.0),
        (CorrectionLevel.sequence, [4.0, 4.0, 4.0], 8.0),
        (CorrectionLevel.sequence_mean, [4 ** (1 / 3)] * 3, 8.0),
    ],
)
def test_ratios_hand_worked(level, first, second):
    found = ratios(level)
    assert found[0].tolist() == pytest.approx([*first, 1.0])
    assert found[1].tolist() == pytest.approx([second, 1.0, 1.0, 1.0])


def test_truncated_weights_hand_worked():
    weights = correction_weights(
        ratios(CorrectionLevel.token), MASK, CorrectionMethod.truncate, 0.5, 3.0
    )
    assert weights[0].tolist() == pytest.approx([2.0, 0.5, 3.0, 0.0])
    assert weights[1].tolist() == pytest.approx([3.0, 0.0, 0.0, 0.0])


def test_masked_weights_hand_worked():
    weights = correction_weights(
        ratios(CorrectionLevel.token), MASK, CorrectionMethod.mask, 0.6, 4.1
    )
    assert weights[0].tolist() == pytest.approx([2.0, 0.0, 4.0, 0.0])
    assert not weights[1].any()


def test_without_mismatch_every_weight_is_one():
    log_probs = torch.linspace(-3.0, -0.1, 8).view(2, 4)
    for level in CorrectionLevel:
        found = importance_ratios(log_probs, log_probs, MASK, level)
        for method in (CorrectionMethod.truncate, CorrectionMethod.mask):
            weights = correction_weights(found, MASK, method, 0.5, 2.0)
            assert torch.equal(weights, MASK.float())


def test_weighted_samples_have_the_trainers_expectation():
    """E_mu[rho f] = E_pi[f], by enumeration of a categorical."""
    pi = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mu = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    values = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    mask = torch.ones(3, 1).bool()
    found = importance_ratios(pi.log()[:, None], mu.log()[:, None], mask, CorrectionLevel.token)
    weights = correction_weights(found, mask, CorrectionMethod.truncate, 0.0, 10.0)[:, 0]
    assert float((mu * weights * values).sum()) == pytest.approx(float((pi * values).sum()))


def mismatch_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Those of padded rows, [B, T]."""
    lengths, difference = torch.full((len(old),), old.shape[1]), old - rollout
    return mismatch_from([mismatch_sums(lengths, difference.flatten(), mask.flatten())])


def test_mismatch_metrics_against_their_definitions():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(5, 7, generator=generator)
    old = rollout + 0.2 * torch.randn(5, 7, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    found = mismatch_metrics(old.masked_fill(~mask, math.nan), rollout, mask)
    rows = [
        [float(o) - float(r) for o, r, m in zip(*row, strict=True) if m]
        for row in zip(old, rollout, mask, strict=True)
    ]
    flat = [d for row in rows for d in row]
    rho = [math.exp(d) for d in flat]
    expected = {
        "kl": -math.fsum(flat) / len(flat),
        "kl_k3": math.fsum(r - 1 - d for r, d in zip(rho, flat, strict=True)) / len(flat),
        "chi2_token": math.fsum(r * r for r in rho) / len(flat) - 1,
        "chi2_sequence": math.fsum(math.exp(2 * math.fsum(row)) for row in rows) / len(rows) - 1,
        "ess": math.fsum(rho) ** 2 / (len(rho) * math.fsum(r * r for r in rho)),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_differences_stay_as_they_are():
    difference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    mismatch_sums(torch.tensor([2]), difference, torch.tensor([True, False]))
    assert difference.tolist() == [1.0, 2.0]


def test_a_policy_that_agrees_with_its_sampler_has_no_mismatch():
    log_probs = -torch.rand(3, 4)
    found = mismatch_metrics(log_probs, log_probs, torch.ones(3, 4).bool())
    assert found == {"kl": 0, "kl_k3": 0, "chi2_token": 0, "chi2_sequence": 0, "ess": 1}


def test_half_of_the_tokens_are_worth_half():
    """Ratios 2 and (nearly) 0: the effective sample size is that of the tokens with weight."""
    old = torch.tensor([[0.0, -19.0]])
    found = mismatch_metrics(old, torch.tensor([[-LOG2, 0.0]]), torch.ones(1, 2).bool())
    assert found["ess"] == pytest.approx(0.5, abs=1e-6)


def test_huge_differences_stay_finite():
    old = torch.tensor([[0.0, 0.0]])
    rollout = torch.tensor([[-500.0, -300.0]])
    mask = torch.ones(1, 2).bool()
    for level in CorrectionLevel:
        found = importance_ratios(old, rollout, mask, level)
        assert found.max() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert all(math.isfinite(value) for value in mismatch_metrics(old, rollout, mask).values())


def test_padding_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(3, 5, generator=generator)
    rollout = -torch.rand(3, 5, generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.8
    wide = [torch.nn.functional.pad(t, (0, 3), value=math.nan) for t in (old, rollout)]
    wide_mask = torch.nn.functional.pad(mask, (0, 3))
    for level in CorrectionLevel:
        narrow = importance_ratios(old, rollout, mask, level)
        torch.testing.assert_close(importance_ratios(*wide, wide_mask, level)[:, :5], narrow)
    assert mismatch_metrics(*wide, wide_mask) == pytest.approx(mismatch_metrics(old, rollout, mask))


def test_bad_input_is_named():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)"):
        importance_ratios(x, x[:, :1], mask, CorrectionLevel.token)
    with pytest.raises(ValueError, match="bool"):
        importance_ratios(x, x, mask.float(), CorrectionLevel.token)
    with pytest.raises(ValueError, match="response token"):
        mismatch_metrics(x, x, ~mask)
    with pytest.raises(ValueError, match="low=2"):
        correction_weights(x, mask, CorrectionMethod.mask, 2.0, 1.0)
    with pytest.raises(ValueError, match="high=0"):
        correction_weights(x, mask, CorrectionMethod.truncate, 0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["old_log_probs", "rollout_log_probs"])
def test_log_probs_that_are_not_finite_are_refused_by_name_and_place(name, value):
    """NaN is neither below nor above a band, and the clamp makes an infinity a usual ratio."""
    tensors = {"old_log_probs": DIFFERENCES - 1.0, "rollout_log_probs": DIFFERENCES - 1.0}
    bad = tensors[name].clone()
    bad[0, 2] = bad[0, 3] = value  # the second stands off the mask
    tensors[name] = bad
    message = rf"finite {name}; 1 of 4 .*, {value}, at \[0, 2\]"
    for level in CorrectionLevel:
        with pytest.raises(ValueError, match=message):
            importance_ratios(**tensors, response_mask=MASK, level=level)
