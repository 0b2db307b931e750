"""schedule: each response once an epoch, equal counts on ranks, budgets kept, cost balanced."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.partition import (
    balance,
    pack_evenly,
    partition_by_micro_batch,
    partition_by_total,
)
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, UpdateSizes, schedule
from tests.support.batches import batch_of
from tests.support.long_tails import attention_cost, long_tailed


def quadratic(tokens: int) -> float:
    return tokens + 0.01 * tokens**2


def scheduled(lengths: list[int], **changes) -> ScheduledBatch:
    sizes = {"num_shards": 2, "mini_batch_size": 4, "epochs": 2, "max_tokens": 40}
    sizes = UpdateSizes(
        **(sizes | {"cost": quadratic, "partition": partition_by_micro_batch} | changes)
    )
    return schedule(batch_of(lengths), sizes, seed=1, step=3)


@settings(max_examples=60, deadline=None)
@given(
    partition=st.sampled_from([partition_by_micro_batch, partition_by_total]),
    ranks=st.sampled_from([1, 2, 4]),
    minis=st.integers(1, 3),
    epochs=st.integers(1, 3),
    budget=st.integers(5, 200),
    data=st.data(),
)
def test_what_every_schedule_must_hold(partition, ranks, minis, epochs, budget, data):
    size = 8 * minis
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=size, max_size=size))
    plan = scheduled(
        lengths,
        num_shards=ranks,
        mini_batch_size=8,
        epochs=epochs,
        max_tokens=budget,
        partition=partition,
    )
    tokens = plan.batch.num_tokens
    for epoch in range(epochs):
        seen = [i for rank in plan.ranks for mini in rank[epoch] for micro in mini for i in micro]
        assert sorted(seen) == list(range(size))
        for mini in range(minis):
            per_rank = [rank[epoch][mini] for rank in plan.ranks]
            assert len({len(micros) for micros in per_rank}) == 1
            assert len(per_rank[0]) <= 8 // ranks
            dealt = [i for micros in per_rank for micro in micros for i in micro]
            assert len(dealt) == 8
            first, *_ = plan.shard(ranks)
            assert first.sampled[epoch][mini] == (sum(lengths[i] for i in dealt), 8)
            assert first.counted == first.sampled
            for micro in (micro for micros in per_rank for micro in micros):
                assert len(micro) == 1 or tokens[micro].sum() <= budget
                assert micro


@settings(max_examples=30, deadline=None)
@given(
    partition=st.sampled_from([partition_by_micro_batch, partition_by_total]),
    ranks=st.sampled_from([1, 2, 4]),
    budget=st.integers(5, 200),
    lengths=st.lists(st.integers(1, 60), min_size=16, max_size=16),
)
def test_the_responses_of_a_pair_share_a_micro_batch(partition, ranks, budget, lengths):
    """As neighbours, in their order; a pair is one response for the sizes."""
    batch = replace(batch_of(lengths), episode=torch.arange(8).repeat_interleave(2))
    sizes = UpdateSizes(ranks, 4, 2, budget, quadratic, partition, whole_episodes=True)
    plan = schedule(batch, sizes, seed=1, step=3)
    for per_rank in zip(*plan.ranks, strict=True):
        for minis in zip(*per_rank, strict=True):
            assert len({len(micros) for micros in minis}) == 1
            micros = [micro for micros in minis for micro in micros]
            assert sum(map(len, micros)) == 8
            for micro in micros:
                assert [row % 2 for row in micro] == [0, 1] * (len(micro) // 2)
                assert all(
                    row + 1 == after for row, after in zip(micro[::2], micro[1::2], strict=True)
                )
                assert len(micro) == 2 or batch.num_tokens[micro].sum() <= budget
    first, *_ = plan.shard(ranks)
    assert sum(totals.episodes for totals in first.counted[0]) == 8


def test_results_return_in_the_order_of_the_batch():
    lengths = [5, 1, 7, 3, 2, 9, 4, 8]
    plan = scheduled(lengths)
    parts = [
        rank.map_first_epoch(lambda micro: Ragged(micro.responses.values, micro.responses.lengths))
        for rank in plan.shard(2)
    ]
    joined = plan.join(parts)
    assert torch.equal(joined.values, plan.batch.responses.values)
    assert joined.lengths.tolist() == lengths


def test_a_result_of_other_lengths_is_refused():
    plan = scheduled([5, 1, 7, 3, 2, 9, 4, 8])
    parts = [rank.map_first_epoch(lambda micro: micro.prompts) for rank in plan.shard(2)]
    with pytest.raises(ValueError, match="one value per response token"):
        plan.join(parts)


def test_a_field_that_is_added_is_a_piece_of_its_own():
    """What the ranks have already stays the same object; the new field follows their rows."""
    plan = scheduled([5, 1, 7, 3, 2, 9, 4, 8])
    values = plan.batch.responses.like(plan.batch.responses.values * 2.0)
    more = plan.adding(values=values)
    for before, after, rank in zip(plan.pieces(2), more.pieces(2), more.shard(2), strict=True):
        assert after[:-1] == before and len(before) == 1
        assert list(after[-1]()) == ["values"]
        assert rank.batch.values.values.tolist() == (rank.batch.responses.values * 2).tolist()
        assert rank.epochs == before[0]().epochs
    assert more.batch.values is values and "values" not in plan.batch.added


def test_a_field_that_is_added_again_replaces_the_former():
    plan = scheduled([5, 1, 7, 3, 2, 9, 4, 8])
    first = plan.batch.responses.like(plan.batch.responses.values * 2.0)
    again = plan.adding(values=first).adding(values=first.like(first.values + 1))
    for rank in again.shard(2):
        assert torch.equal(rank.batch.values.values, rank.batch.responses.values * 2.0 + 1)


def test_mini_batches_of_a_rank_are_its_micro_batches():
    rank = scheduled([5, 1, 7, 3, 2, 9, 4, 8]).shard(2)[0]
    minis = list(rank.mini_batches())
    assert len(minis) == 2 * 2
    first = [micro.group_id.tolist() for mini, _ in minis[:2] for micro in mini]
    assert first == [micro.group_id.tolist() for micro in rank.micro_batches(epoch=0)]


def test_order_depends_on_seed_step_and_epoch_alone():
    lengths = list(range(1, 17))
    assert scheduled(lengths).ranks == scheduled(lengths).ranks
    one = scheduled(lengths, epochs=1).ranks
    assert scheduled(lengths).ranks[0][0] == one[0][0]
    assert scheduled(lengths).ranks[0][0] != scheduled(lengths).ranks[0][1]


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"8 responses.*mini-batches of 3"):
        scheduled([1] * 8, mini_batch_size=3)


def test_balance_hand_worked():
    # Longest first, each to the cheapest part that has room, in
    # parts of two: 9 to A, 8 to B, 7 to B (8 < 9), 1 to A (B is full).
    assert balance([0, 1, 2, 3], [9, 8, 7, 1], 2) == [[0, 3], [1, 2]]


def test_balance_of_equal_costs_is_even():
    parts = balance(list(range(10)), [1.0] * 10, 3)
    assert sorted(map(len, parts)) == [3, 3, 4]


def test_pack_evenly_hand_worked():
    # 6 to A, 5 to B, 4 to B (5 < 6), 3 to A (6 < 9), 2: both have cost 9, A comes first
    assert pack_evenly([0, 1, 2, 3, 4], [6, 5, 4, 3, 2], [1] * 5, 2, 5) == [[0, 3, 4], [1, 2]]


def test_best_fit_where_the_cheapest_bin_runs_out_of_room():
    # Cheapest first: 4 to A, 3 to B, 3 to B, 2 to A and no room for the last 2. Best fit
    # decreasing: 4 to A, 3 beside it (full), 3 to B, 2 and 2 beside it (full).
    sizes = [4, 3, 3, 2, 2]
    bins = pack_evenly([0, 1, 2, 3, 4], sizes, sizes, 2, 7)
    assert bins == [[0, 1], [2, 3, 4]]


def test_what_cannot_fit_is_told():
    assert pack_evenly([0, 1, 2], [2, 2, 2], [2, 2, 2], 1, 5) is None


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_wait_little_for_each_other_on_long_tailed_lengths(ranks, seed):
    """Ranks meet in every micro-batch: the sum of its largest costs is what an update takes.

    Within 3 % of perfect balance, in as few micro-batches as the budget allows.
    """
    lengths = long_tailed(32 * ranks, seed)
    plan = scheduled(
        lengths,
        num_shards=ranks,
        mini_batch_size=32 * ranks,
        epochs=1,
        max_tokens=16384,
        cost=attention_cost,
    )
    tokens = plan.batch.num_tokens.tolist()

    def cost(micro):
        return sum(attention_cost(tokens[i]) for i in micro)

    per_rank = [rank[0][0] for rank in plan.ranks]
    assert len(per_rank[0]) == math.ceil(sum(tokens) / (ranks * 16384))
    waited_for = sum(max(map(cost, turn)) for turn in zip(*per_rank, strict=True))
    mean = sum(cost(micro) for micros in per_rank for micro in micros) / ranks
    assert waited_for / mean < 1.03


def test_as_few_micro_batches_as_the_budget_allows():
    """Twelve responses of 4 tokens, two of them to a budget of 8: three turns of two ranks."""
    plan = scheduled([2] * 12, mini_batch_size=12, epochs=1, max_tokens=8)
    assert [len(rank[0][0]) for rank in plan.ranks] == [3, 3]
    assert all(len(micro) == 2 for rank in plan.ranks for micro in rank[0][0])


def test_a_loss_mask_changes_what_the_policy_loss_is_divided_by_and_nothing_else():
    lengths = [5, 1, 7, 3, 2, 9, 4, 8]
    plan = scheduled(lengths, epochs=1)
    mask = torch.arange(39) >= 6  # of the first response one token is left, of the second none
    mask[0] = True
    batch = plan.batch.adding(loss_mask=plan.batch.responses.like(mask))
    masked = ScheduledBatch.of(batch, plan.ranks)
    for before, after in zip(plan.shard(2), masked.shard(2), strict=True):
        assert after.sampled == before.sampled == before.counted
        totals = [total for _, total in after.policy_mini_batches()]
        assert [total for _, total in after.mini_batches()] == before.sampled[0]
        assert sum(total.tokens for total in totals) == 34
        assert sum(total.episodes for total in totals) == 7


def test_what_is_sent_is_made_when_it_is_sent():
    """The driver holds one copy of the batch: a rank's part lives as long as it is sent."""
    plan = scheduled([5, 1, 7, 3, 2, 9, 4, 8])
    more = plan.adding(values=plan.batch.responses.like(plan.batch.responses.values * 2.0))
    for pieces in more.pieces(2):
        assert all(piece() is not piece() for piece in pieces)
