"""Rollout correction on random ragged batches: every level and method against plain Python."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.algorithms.masked import MAX_LOG_RATIO
from hybridrl.algorithms.rollout_correction import correction_weights, importance_ratios
from hybridrl.config.choices import CorrectionLevel, CorrectionMethod

# Row of a response's log-ratios -> log-ratio of each token.
LEVELS = {
    CorrectionLevel.token: lambda row: row,
    CorrectionLevel.sequence: lambda row: [math.fsum(row)] * len(row),
    CorrectionLevel.sequence_mean: lambda row: [statistics.fmean(row)] * len(row),
}
METHODS = {
    CorrectionMethod.truncate: lambda rho, low, high: min(rho, high),
    CorrectionMethod.mask: lambda rho, low, high: rho if low <= rho <= high else 0.0,
}
EVERY_LEVEL = pytest.mark.parametrize("level", LEVELS)
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def ragged(seed: int, responses: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and sampler (float64, NaN off the mask) and a mask with gaps."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(responses, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(responses, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(responses, 6, generator=generator) < 0.6
    off = ~mask
    return (rollout + scale * noise).masked_fill(off, torch.nan), rollout.masked_fill(off, 0), mask


@EVERY_LEVEL
@EVERY_METHOD
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    responses=st.integers(1, 6),
    scale=st.sampled_from([0.01, 0.5, 20.0]),
    low=st.floats(0.0, 0.95),
    high=st.floats(1.0, 4.0),
)
def test_ratios_and_weights_are_those_of_plain_python(
    level, method, seed, responses, scale, low, high
):
    old, rollout, mask = ragged(seed, responses, scale)
    ratios = importance_ratios(old, rollout, mask, level)
    weights = correction_weights(ratios, mask, method, low, high)
    assert ratios.dtype == weights.dtype == torch.float64
    assert (ratios[~mask] == 1).all() and (weights[~mask] == 0).all()
    for b in range(responses):
        keep = mask[b]
        pairs = zip(old[b, keep].tolist(), rollout[b, keep].tolist(), strict=True)
        row = [mine - theirs for mine, theirs in pairs]
        bounded = [
            min(max(d, -MAX_LOG_RATIO), MAX_LOG_RATIO) for d in (LEVELS[level](row) if row else [])
        ]
        expected = [math.exp(d) for d in bounded]
        assert ratios[b, keep].tolist() == pytest.approx(expected, rel=1e-9)
        assert weights[b, keep].tolist() == pytest.approx(
            [METHODS[method](rho, low, high) for rho in expected], rel=1e-9
        )
