"""RolloutBatch and PromptBatch: selection takes every field along; dealing restores order."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import EngineStats, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from tests.support.batches import batch_of


def test_select_takes_every_field():
    batch = batch_of([3, 1, 2])
    batch = batch.adding(scores=batch.responses.like(batch.responses.values * 10.0))
    batch = replace(batch, baseline_rewards=torch.tensor([0.5, 1.5, 2.5]))
    picked = batch.select([2, 0])
    assert picked.baseline_rewards.tolist() == [2.5, 0.5]
    assert picked.group_id.tolist() == [2, 0]
    assert picked.scores.values.tolist() == [20, 20, 0, 0, 0]
    assert picked.num_tokens.tolist() == [4, 5]


def test_a_field_of_other_lengths_is_refused():
    batch = batch_of([3, 1])
    with pytest.raises(ValueError, match="values"):
        batch.adding(values=Ragged.from_rows([[1.0], [1.0]], torch.float32))


def test_concat_joins_in_order():
    first = replace(batch_of([1, 2]), baseline_rewards=torch.tensor([0.5, 1.5]))
    second = replace(batch_of([3]), baseline_rewards=torch.tensor([2.5]))
    joined = RolloutBatch.concat([first, second])
    assert joined.responses.lengths.tolist() == [1, 2, 3]
    assert joined.baseline_rewards.tolist() == [0.5, 1.5, 2.5]
    assert RolloutBatch.concat([batch_of([1]), batch_of([2])]).baseline_rewards is None


def answer(part: PromptBatch) -> RolloutBatch:
    """What an engine would return: responses that spell 10 * prompt_id + sample."""
    count = part.responses_per_prompt
    rows = [[10 * int(i) + k] for i in part.prompt_id for k in range(count)]
    repeats = [i for i in range(len(part)) for _ in range(count)]
    responses = Ragged.from_rows(rows, torch.int64)
    ones = responses.like(torch.ones_like(responses.values, dtype=torch.bool))
    return RolloutBatch(
        prompts=part.prompts.select(repeats),
        responses=responses,
        response_mask=ones,
        rollout_log_probs=responses.like(responses.values.float()),
        group_id=part.prompt_id[repeats],
        weight_version=torch.ones(len(rows), dtype=torch.int64),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        engines=(EngineStats(tokens=len(rows), seconds=2.0, first_token_s=0.5),),
    )


def prompts_of(lengths: list[int], expected_tokens: torch.Tensor | None = None) -> PromptBatch:
    """Prompts of these lengths, with ids from 0 on, two responses each."""
    return PromptBatch(
        prompts=Ragged.from_rows([[0] * length for length in lengths], torch.int64),
        prompt_id=torch.arange(len(lengths)),
        step=1,
        responses_per_prompt=2,
        temperature=1.0,
        top_p=1.0,
        expected_tokens=expected_tokens,
    )


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
@pytest.mark.parametrize("expected", [None, [7.0, 1.0, 6.0, 2.0, 5.0, 3.0, 4.0]])
def test_dealt_prompts_come_back_in_order(engines, expected):
    lengths = [1, 9, 4, 4, 2, 30, 7]
    prompts = prompts_of(lengths, None if expected is None else torch.tensor(expected))
    parts = prompts.shard(engines)
    assert {len(part) for part in parts} <= {7 // engines, 7 // engines + 1}
    joined = prompts.join([answer(part) for part in parts])
    assert joined.responses.values.tolist() == [10 * i + k for i in range(7) for k in range(2)]
    assert joined.prompts.lengths.tolist() == [length for length in lengths for _ in range(2)]
    assert [engine.tokens for engine in joined.engines] == [2 * len(part) for part in parts]


def test_prompts_are_dealt_by_expected_tokens():
    """Greedy, longest first: 9 | 8, 7 to the second, 2 to the first."""
    expected = torch.tensor([2.0, 9.0, 7.0, 8.0], dtype=torch.float64)
    first, second = prompts_of([50, 1, 1, 1], expected).shard(2)
    assert (first.prompt_id.tolist(), second.prompt_id.tolist()) == ([1, 0], [3, 2])
    assert first.expected_tokens.tolist() == [9.0, 2.0]


def test_conversations_stay_on_their_engines():
    prompts = replace(
        prompts_of([3, 1, 2, 5]),
        engine=torch.tensor([2, 0, 2, 0]),
        max_tokens=torch.tensor([7, 8, 9, 10]),
        first_sample=torch.tensor([0, 1, 2, 3]),
    )
    parts = prompts.shard(3)
    assert [part.prompt_id.tolist() for part in parts] == [[1, 3], [], [0, 2]]
    assert [part.max_tokens.tolist() for part in parts] == [[8, 10], [], [7, 9]]
    assert [part.first_sample.tolist() for part in parts] == [[1, 3], [], [0, 2]]
    joined = prompts.join([answer(part) for part in parts])
    assert joined.responses.values.tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
    assert joined.engine.tolist() == [2, 2, 0, 0, 2, 2, 0, 0]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_who_answered_is_known(engines):
    prompts = prompts_of([1, 9, 4, 4, 2])
    parts = prompts.shard(engines)
    joined = prompts.join([answer(part) for part in parts])
    for engine, part in enumerate(parts):
        rows = torch.isin(joined.group_id, part.prompt_id)
        assert (joined.engine[rows] == engine).all() and rows.sum() == 2 * len(part)


def test_speed_of_an_engine():
    assert EngineStats(tokens=300, seconds=2.0, first_token_s=0.1).tokens_per_second == 150.0
    assert EngineStats(tokens=0, seconds=0.0, first_token_s=0.0).tokens_per_second == 0.0
