"""The tripwire between vLLM's log-probs and the trainer's."""

import math

import pytest
import torch

from hybridrl.trainer.mismatch import (
    RolloutMismatch,
    check_rollout_log_probs,
    log_prob_difference,
)
from tests.batches import batch_of


def batch_with(rollout: list[float], old: list[float]):
    batch = batch_of([2, 1])
    lengths = batch.responses
    return batch_of([2, 1]).adding(
        rollout_log_probs=lengths.like(torch.tensor(rollout)),
        old_log_probs=lengths.like(torch.tensor(old)),
    )


def test_mean_and_maximum_hand_worked():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5])
    found = check_rollout_log_probs(batch, top_p=1.0, limit=0.25)
    assert found == {"rollout/log_prob_diff_mean": 0.25, "rollout/log_prob_diff_max": 0.5}


def test_stale_weights_stop_the_run_and_are_named():
    batch = batch_with([-1.0, -2.0, -3.0], [-1.0, -2.25, -2.5])
    with pytest.raises(RolloutMismatch, match=r"0\.25 nats.*weight version 0"):
        check_rollout_log_probs(batch, top_p=1.0, limit=0.2)


def test_nan_is_no_agreement():
    with pytest.raises(RolloutMismatch, match="nan nats"):
        check_rollout_log_probs(
            batch_with([-1.0, -2.0, -3.0], [-1.0, math.nan, -3.0]), top_p=1.0, limit=0.5
        )


def test_a_nucleus_may_raise_but_not_lower():
    trained = torch.tensor([-1.0, -1.0, -1.0])
    raised = trained + torch.tensor([math.log(2), -0.5, 1.0])
    difference = log_prob_difference(raised, trained, top_p=0.5)
    torch.testing.assert_close(difference, torch.tensor([0.0, 0.5, 1.0 - math.log(2)]))
