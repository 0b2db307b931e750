"""RolloutBatch and PromptBatch: selection takes every field along; dealing restores order."""

import pytest
import torch

from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from tests.batches import batch_of


def test_select_takes_every_field():
    batch = batch_of([3, 1, 2])
    batch = batch.adding(scores=batch.responses.like(batch.responses.values * 10.0))
    picked = batch.select([2, 0])
    assert picked.group_id.tolist() == [2, 0]
    assert picked.scores.values.tolist() == [20, 20, 0, 0, 0]
    assert picked.num_tokens.tolist() == [4, 5]


def test_a_field_of_other_lengths_is_refused():
    batch = batch_of([3, 1])
    with pytest.raises(ValueError, match="values"):
        batch.adding(values=Ragged.from_rows([[1.0], [1.0]], torch.float32))


def test_concat_joins_in_order():
    joined = RolloutBatch.concat([batch_of([1, 2]), batch_of([3])])
    assert joined.responses.lengths.tolist() == [1, 2, 3]


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
    )


@pytest.mark.parametrize("engines", [1, 2, 3, 7])
def test_dealt_prompts_come_back_in_order(engines):
    lengths = [1, 9, 4, 4, 2, 30, 7]
    prompts = PromptBatch(
        prompts=Ragged.from_rows([[0] * length for length in lengths], torch.int64),
        prompt_id=torch.arange(7),
        step=1,
        responses_per_prompt=2,
        temperature=1.0,
        top_p=1.0,
    )
    parts = prompts.shard(engines)
    assert {len(part) for part in parts} <= {7 // engines, 7 // engines + 1}
    joined = prompts.join([answer(part) for part in parts])
    assert joined.responses.values.tolist() == [10 * i + k for i in range(7) for k in range(2)]
    assert joined.prompts.lengths.tolist() == [length for length in lengths for _ in range(2)]
