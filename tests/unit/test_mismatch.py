"""The tripwire between vLLM's log-probs and the trainer's."""

import math
import re
from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.mismatch import (
    adapter_share,
    check_rollout_log_probs,
    current_tokens,
    log_prob_difference,
)
from tests.batches import batch_of


def batch_with(rollout: list[float], old: list[float], engine: tuple[int, int] = (0, 0)):
    batch = batch_of([2, 1])
    lengths = batch.responses
    return replace(batch, engine=torch.tensor(engine)).adding(
        rollout_log_probs=lengths.like(torch.tensor(rollout)),
        old_log_probs=lengths.like(torch.tensor(old)),
    )


def check(batch: RolloutBatch, limit: float) -> dict[str, float | None]:
    return check_rollout_log_probs(
        batch, batch.response_mask.values, top_p=1.0, limit=limit, where=lambda k: f"rank {2 * k}"
    )


def test_mean_and_maximum_hand_worked():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5], engine=(1, 0))
    assert check(batch, limit=0.5) == {
        "rollout/log_prob_diff_mean": 0.25,
        "rollout/log_prob_diff_engine_max": 0.5,
        "rollout/log_prob_diff_worst_engine": 0.0,
        "rollout/log_prob_diff_max": 0.5,
    }


def test_stale_weights_stop_the_run_and_are_named():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5])
    with pytest.raises(RunStopped, match=r"0\.25 nats(?s:.*)weight version 0"):
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
    assert current_tokens(replace(batch, token_versions=None), 4, keep_kv=True).equal(mask.values)


def test_one_of_many_engines_off_by_a_nat_is_named_with_its_ranks():
    """Over all tokens the difference is 1/128, far below the limit."""
    batch = batch_of([4] * 128)
    off = (batch.responses.row_ids() == 70).float()
    batch = replace(batch, engine=torch.arange(128).flip(0)).adding(
        old_log_probs=batch.responses.like(batch.rollout_log_probs.values - off)
    )
    with pytest.raises(RunStopped, match=r"on 1 of 128 rollout engines") as caught:
        check(batch, limit=0.1)
    (named,) = re.findall(r"engine (\d+) \((.*)\): ([\d.]+) nats", str(caught.value))
    assert named == ("57", "rank 114", "1")


def test_a_nucleus_may_raise_but_not_lower():
    trained = torch.tensor([-1.0, -1.0, -1.0])
    raised = trained + torch.tensor([math.log(2), -0.5, 1.0])
    difference = log_prob_difference(raised, trained, top_p=0.5)
    torch.testing.assert_close(difference, torch.tensor([0.0, 0.5, 1.0 - math.log(2)]))


@pytest.mark.parametrize(
    ("rollout", "share"),
    [([-0.5, -2.5, -3.0], 1.0), ([-1.0, -2.0, -3.0], 0.0), ([-0.75, -2.25, -9.0], 0.5)],
)
def test_share_of_what_adapters_learned_by_hand(rollout, share):
    """The trainer moved by +0.5 and -0.5, vLLM by all, none and half of it; one token is masked."""
    batch = batch_with(rollout, [-0.5, -2.5, -3.0])
    lengths = batch.responses
    batch = replace(batch, response_mask=lengths.like(torch.tensor([True, True, False])))
    assert adapter_share(batch, batch.response_mask.values, top_p=1.0) == {
        "rollout/adapter_share": None
    }
    batch = batch.adding(ref_log_probs=lengths.like(torch.tensor([-1.0, -2.0, -3.0])))
    assert adapter_share(batch, batch.response_mask.values, top_p=1.0) == {
        "rollout/adapter_share": share
    }


def test_adapters_that_have_not_moved_have_no_share():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0])
    batch = batch.adding(ref_log_probs=batch.old_log_probs)
    assert adapter_share(batch, batch.response_mask.values, top_p=1.0) == {
        "rollout/adapter_share": None
    }
