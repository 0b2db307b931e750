"""The tripwire between vLLM's log-probs and the trainer's."""

import math
import re
from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.mismatch import (
    adapter_share,
    check_rollout_log_probs,
    current_tokens,
)
from tests.support.batches import batch_of


def batch_with(
    rollout: list[float], old: list[float], engine: tuple[int, int] = (0, 0), times: int = 1
):
    """Two responses of 2 and 1 tokens, each `times` in a row."""
    batch = batch_of([2 * times, times])
    lengths = batch.responses
    return batch.adding(
        engine=torch.tensor(engine),
        rollout_log_probs=lengths.like(torch.tensor(rollout).repeat_interleave(times)),
        old_log_probs=lengths.like(torch.tensor(old).repeat_interleave(times)),
    )


def check(batch: RolloutBatch, limit: float) -> dict[str, float | None]:
    return check_rollout_log_probs(
        batch, batch.response_mask.values, limit=limit, where=lambda k: f"rank {2 * k}"
    )


def test_mean_and_maximum_hand_worked():
    """The mean of an engine counts 100 tokens without a difference, too."""
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5], engine=(1, 0), times=100)
    assert check(batch, limit=0.5) == {
        "rollout/log_prob_diff_mean": 0.25,
        "rollout/log_prob_diff_engine_max": 0.25,
        "rollout/log_prob_diff_worst_engine": 0.0,
        "rollout/log_prob_diff_max": 0.5,
    }


def test_stale_weights_stop_the_run_and_are_named():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5], times=1000)
    with pytest.raises(RunStopped, match=r"0\.25 nats(?s:.*)3000 tokens(?s:.*)weight version 0"):
        check(batch, limit=0.2)


def test_nan_is_no_agreement():
    with pytest.raises(RunStopped, match="nan nats"):
        check(batch_with([-1.0, -2.0, -3.0], [-1.0, math.nan, -3.0]), limit=0.5)


def test_tokens_of_earlier_weights_and_what_is_sampled_after_them_do_not_count():
    batch = batch_of([3, 2, 2])
    lengths = batch.responses
    mask = lengths.like(torch.tensor([True, False, True, True, True, True, True]))
    versions = lengths.like(torch.tensor([4, -1, 4, 3, 4, 3, 3]))
    batch = replace(batch, response_mask=mask, token_versions=versions)
    for keep_kv, counted in ((False, [0, 2, 4]), (True, [0, 2])):
        found = current_tokens(batch, 4, keep_kv=keep_kv)
        assert found.nonzero().flatten().tolist() == counted
    whole = replace(batch, token_versions=None, weight_version=torch.full((3,), 4))
    assert current_tokens(whole, 4, keep_kv=True).equal(mask.values)


def test_one_of_many_engines_off_by_a_nat_is_named_with_its_ranks():
    """Over all tokens the difference is 1/128, far below the limit; 12 tokens are enough."""
    batch = batch_of([12] * 128)
    off = (batch.responses.row_ids() == 70).float()
    old = batch.responses.like(batch.rollout_log_probs.values - off)
    batch = batch.adding(engine=torch.arange(128).flip(0), old_log_probs=old)
    with pytest.raises(RunStopped, match=r"on 1 of 128 rollout engines") as caught:
        check(batch, limit=0.1)
    (named,) = re.findall(r"engine (\d+) \((.*)\): ([\d.]+) nats", str(caught.value))
    assert named == ("57", "rank 114", "1")


def drawn(counts: torch.Tensor, mean: float, seed: int) -> RolloutBatch:
    """Log-normal differences of these numbers of tokens, one response on each engine.

    Where bfloat16 made 0.037 nats in the mean, the largest of 10^7 was 1.45
    (recipes/gsm8k_ppo): a deviation of the logarithm of 0.75. Here it is 1.
    """
    log = torch.randn(int(counts.sum()), generator=torch.Generator().manual_seed(seed)) - 0.5
    zeros, engines = Ragged(torch.zeros_like(log), counts), torch.arange(len(counts))
    return RolloutBatch(
        prompts=Ragged(engines, torch.ones_like(counts)),
        responses=zeros,
        response_mask=zeros.like(torch.ones_like(log, dtype=torch.bool)),
        rollout_log_probs=zeros,
        group_id=engines,
        weight_version=torch.zeros_like(engines),
        truncated=torch.zeros(len(counts), dtype=torch.bool),
        added={"engine": engines, "old_log_probs": zeros.like(mean * log.exp())},
    )


def test_few_tokens_stop_no_run_in_ten_thousand_steps_of_16_engines():
    """Each engine has 2 to 4 tokens in each step, whose plain means are above the limit often."""
    counts = torch.arange(2, 5).repeat_interleave(16 * 10**4 // 3)
    batch = drawn(counts, mean=0.05, seed=1)
    found = check(batch, limit=0.1)
    assert found["rollout/log_prob_diff_engine_max"] < 0.06
    sums = torch.segment_reduce(batch.old_log_probs.values, "sum", lengths=counts)
    assert (sums / counts > 0.1).float().mean() > 0.05


@pytest.mark.parametrize("seed", range(5))
def test_other_weights_are_found_in_a_step_of_200_tokens(seed):
    healthy, other = (drawn(torch.full((8,), 200), mean, seed) for mean in (0.05, 0.3))
    check(healthy, limit=0.1)
    with pytest.raises(RunStopped, match="on 8 of 8"):
        check(other, limit=0.1)


@pytest.mark.parametrize(
    ("rollout", "share"),
    [([-0.5, -2.5, -3.0], 1.0), ([-1.0, -2.0, -3.0], 0.0), ([-0.75, -2.25, -9.0], 0.5)],
)
def test_share_of_what_adapters_learned_by_hand(rollout, share):
    """The trainer moved by +0.5 and -0.5, vLLM by all, none and half of it; one token is masked."""
    batch = batch_with(rollout, [-0.5, -2.5, -3.0])
    lengths = batch.responses
    batch = replace(batch, response_mask=lengths.like(torch.tensor([True, True, False])))
    assert adapter_share(batch, batch.response_mask.values) == {"rollout/adapter_share": None}
    batch = batch.adding(ref_log_probs=lengths.like(torch.tensor([-1.0, -2.0, -3.0])))
    assert adapter_share(batch, batch.response_mask.values) == {"rollout/adapter_share": share}


def test_adapters_that_have_not_moved_have_no_share():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0])
    batch = batch.adding(ref_log_probs=batch.old_log_probs)
    assert adapter_share(batch, batch.response_mask.values) == {"rollout/adapter_share": None}
