"""RolloutBatch: selection takes every field along."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import ConversationOutcome, EngineStats, RolloutBatch
from hybridrl.data.ragged import Ragged
from tests.support.batches import batch_of


def test_select_takes_every_field():
    batch = batch_of([3, 1, 2])
    scores = batch.responses.like(batch.responses.values * 10.0)
    batch = batch.adding(scores=scores, baseline_rewards=torch.tensor([0.5, 1.5, 2.5]))
    outcome = ConversationOutcome(*(torch.tensor([k, 5, k + 1]) for k in range(3)))
    batch = replace(batch, conversation=outcome, environment_s=0.5)
    picked = batch.select([2, 0])
    assert picked.baseline_rewards.tolist() == [2.5, 0.5]
    assert picked.group_id.tolist() == [2, 0] and picked.environment_s == 0.5
    assert [x.tolist() for x in vars(picked.conversation).values()] == [[1, 0], [2, 1], [3, 2]]
    assert picked.scores.values.tolist() == [20, 20, 0, 0, 0]
    assert picked.num_tokens.tolist() == [4, 5]


def test_a_field_of_other_lengths_is_refused():
    batch = batch_of([3, 1])
    with pytest.raises(ValueError, match="values"):
        batch.adding(values=Ragged.from_rows([[1.0], [1.0]], torch.float32))
    with pytest.raises(TypeError, match="value"):
        batch.adding(value=batch.rollout_log_probs)


def test_a_field_that_no_phase_has_added_is_an_error_that_names_it():
    with pytest.raises(AttributeError, match=r"has no values(?s:.*)scores"):
        _ = (batch := batch_of([3, 1])).adding(scores=batch.rollout_log_probs).values


def test_concat_joins_in_order():
    first = batch_of([1, 2]).adding(baseline_rewards=torch.tensor([0.5, 1.5]))
    second = batch_of([3]).adding(baseline_rewards=torch.tensor([2.5]))
    joined = RolloutBatch.concat([first, second])
    assert joined.responses.lengths.tolist() == [1, 2, 3]
    assert joined.baseline_rewards.tolist() == [0.5, 1.5, 2.5]
    assert not RolloutBatch.concat([batch_of([1]), batch_of([2])]).added


def test_speed_of_an_engine():
    assert EngineStats(tokens=300, seconds=2.0, first_token_s=0.1).tokens_per_second == 150.0
    assert EngineStats(tokens=0, seconds=0.0, first_token_s=0.0).tokens_per_second == 0.0
