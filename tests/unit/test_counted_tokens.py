"""What does not count in the loss does not count in whitening: every estimator, every mask."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.masked import WHITEN_EPS
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.trainer import advantage
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.sampling.source import Sampled, without_loss
from tests.support.batches import batch_of
from tests.support.run_configs import run_config

ALGORITHM = run_config().algorithm
EACH = 3


def case(seed: int, *, tools: bool, unmixed: int, filtered: bool) -> tuple[RolloutBatch, Ragged]:
    """Four groups: rewards on sampled tokens, some cut off, the last groups left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (4 * EACH,), generator=generator)
    batch = batch_of(lengths.tolist())
    like, count = batch.responses.like, int(lengths.sum())
    mask = torch.ones(count, dtype=torch.bool)
    if tools:
        mask = torch.rand(count, generator=generator) < 0.6
        mask[lengths.cumsum(0) - 1] = True
    batch = batch.adding(
        response_mask=like(mask),
        group_id=torch.arange(4).repeat_interleave(EACH),
        truncated=torch.rand(4 * EACH, generator=generator) < 0.3,
        values=like(torch.randn(count, generator=generator)),
        baseline_rewards=torch.randn(4 * EACH, generator=generator),
    )
    mixed = torch.arange(4 * EACH) < (4 - unmixed) * EACH
    sampled = Sampled(batch, [])
    sampled = without_loss(sampled, ~mixed) if unmixed else sampled
    if filtered:
        sampled = without_loss(sampled, batch.truncated)
    return sampled.batch, like(torch.randn(count, generator=generator))


def estimated(
    name: str, batch: RolloutBatch, rewards: Ragged, *, whiten: bool = True
) -> torch.Tensor:
    own = {"advantage": name, "gamma": 0.9, "lam": 0.8, "pass_k": 2, "whiten_advantages": whiten}
    return (
        AdvantageEstimator(replace(ALGORITHM, **own)).estimate(batch, rewards)["advantages"].values
    )


CASES = {
    "tools": st.booleans(),
    "unmixed": st.integers(0, 2),
    "filtered": st.booleans(),
    "seed": st.integers(0, 10_000),
}


@pytest.mark.parametrize("elements", [2**20, 30])
@pytest.mark.parametrize("name", BUILT_IN_ESTIMATORS)
@settings(max_examples=15, deadline=None)
@given(**CASES)
@example(tools=False, unmixed=1, filtered=True, seed=1353)  # equal advantages, to rounding
@example(tools=False, unmixed=2, filtered=True, seed=147)  # remax: deviation 0.005
def test_tokens_that_count_have_mean_0_and_deviation_1(name, elements, **kinds):
    batch, rewards = case(**kinds)
    counted = batch.counted.values
    assume(int(counted.sum()) > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantage, "BLOCK_ELEMENTS", elements)
        found = estimated(name, batch, rewards)
    assert (found[~counted] == 0).all()
    # Where nothing that counts is preferred, whitening leaves the rounding of equal advantages.
    plain = estimated(name, batch, rewards, whiten=False)[counted].double()
    assume(float(plain.std()) > 1e-4)
    variance = float(plain.var(correction=0))
    kept = found[counted].double()
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5)
    expected = math.sqrt(variance / (variance + WHITEN_EPS))
    assert float(kept.std(correction=0)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", BUILT_IN_ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_what_does_not_count_changes_nothing(name, **kinds):
    """Other rewards and values of what does not count, as far as outcomes are not compared.

    An estimator that compares a prompt's responses takes the outcomes of all of them, cut off or
    not (GRPO's mean and deviation are of the group): there, only groups count or do not.
    """
    batch, rewards = case(**kinds)
    counted = batch.counted.values
    of_row = batch.counted.counts() > 0
    if BUILT_IN_ESTIMATORS[name].compares_groups:
        of_row = of_row.view(4, EACH).any(1).repeat_interleave(EACH)
    free = ~batch.responses.spread(of_row) | ~batch.response_mask.values
    other = rewards.like(torch.where(free, 7.0 - 3 * rewards.values, rewards.values))
    values = torch.where(free, 5.0 - batch.values.values, batch.values.values)
    changed = batch.adding(values=batch.responses.like(values))
    before, after = estimated(name, batch, rewards), estimated(name, changed, other)
    torch.testing.assert_close(after[counted], before[counted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BUILT_IN_ESTIMATORS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), tools=st.booleans())
def test_blocks_are_the_batch_as_a_whole(name, seed, tools):
    """However small the blocks are; a batch that is one block has the same bits as ever."""
    batch, rewards = case(seed, tools=tools, unmixed=0, filtered=False)
    whole = estimated(name, batch, rewards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advantage, "BLOCK_ELEMENTS", 1)
        torch.testing.assert_close(estimated(name, batch, rewards), whole, atol=1e-5, rtol=1e-5)
