"""Balancing the ranks' totals: hand-worked cases, Graham's bound, and when it is the rule."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.choices import Accumulation
from hybridrl.data.partition import (
    balance_totals,
    partition_by_micro_batch,
    partition_by_total,
    partitioner_for,
)
from tests.support.long_tails import attention_cost, long_tailed
from tests.support.role_configs import fsdp_config


def total(cost, micros):
    return sum(cost[i] for micro in micros for i in micro)


def micro_cost(cost, micro):
    return sum(cost[i] for i in micro)


def smallest_largest_total(cost, num_parts):
    """The best possible largest total, by trying every way to deal."""
    best = sum(cost)
    for way in itertools.product(range(num_parts), repeat=len(cost)):
        totals = [0] * num_parts
        for item, part in enumerate(way):
            totals[part] += cost[item]
        best = min(best, max(totals))
    return best


def test_totals_hand_worked():
    # Longest first, each to the cheapest part: 9 to A, 8 to B, 7 to B (8 < 9), 1 to A (9 < 15)
    assert balance_totals([0, 1, 2, 3], [9, 8, 7, 1], 2, at_least=1) == [[0, 3], [1, 2]]


def test_items_are_kept_for_parts_that_lack_some():
    # 20 to A, 5, 4, 3 to B; of the last two A lacks two.
    cost = [20, 5, 4, 3, 2, 1]
    assert balance_totals(range(6), cost, 2, at_least=3) == [[0, 4, 5], [1, 2, 3]]
    assert balance_totals(range(6), cost, 2, at_least=1) == [[0], [1, 2, 3, 4, 5]]


@settings(max_examples=60, deadline=None)
@given(
    parts=st.sampled_from([2, 3]),
    cost=st.lists(st.integers(1, 100), min_size=3, max_size=7),
)
def test_largest_total_is_within_grahams_bound_of_the_best_possible(parts, cost):
    dealt = balance_totals(range(len(cost)), cost, parts, at_least=1)
    best = smallest_largest_total(cost, parts)
    assert max(micro_cost(cost, part) for part in dealt) <= (4 / 3 - 1 / (3 * parts)) * best


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([2, 4]),
    budget=st.integers(20, 300),
    lengths=st.lists(st.integers(1, 60), min_size=24, max_size=24),
)
def test_a_rank_exceeds_another_by_less_than_one_response(ranks, budget, lengths):
    """Longest first to the cheapest leaves no rank that could do without its last response.

    Ranks with no more responses than micro-batches may have been given some to have enough.
    """
    cost = [tokens + 0.01 * tokens**2 for tokens in lengths]
    dealt = partition_by_total(list(range(24)), cost, lengths, ranks, budget)
    least = min(total(cost, micros) for micros in dealt)
    for micros in dealt:
        mine = [i for micro in micros for i in micro]
        if len(mine) > len(micros):
            assert total(cost, micros) - min(cost[i] for i in mine) <= least + 1e-9


@settings(max_examples=100, deadline=None)
@given(
    partition=st.sampled_from([partition_by_micro_batch, partition_by_total]),
    ranks=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=14),
)
def test_no_micro_batch_is_empty_whatever_the_number_of_sequences(partition, ranks, lengths):
    """Two sequences of more than half the budget share one, if a rank has too few otherwise."""
    cost = [float(tokens) for tokens in lengths]
    dealt = partition(list(range(len(lengths))), cost, lengths, ranks, 60)
    assert len({len(micros) for micros in dealt}) == 1
    assert all(micro for micros in dealt for micro in micros)
    assert sorted(i for micros in dealt for micro in micros for i in micro) == [*range(len(cost))]
    largest = max(sum(lengths[i] for i in micro) for micros in dealt for micro in micros)
    assert largest <= (60 if len(lengths) % ranks == 0 else 120)


def test_ranks_begin_and_end_with_micro_batches_of_the_usual_cost():
    # Of 60 in all each rank gets 30: 20 and 5 x 2, or 15 x 2. Three micro-batches of at most 10
    # tokens are 20, 3 x 2 and 2 x 2 (the cheapest bin first), or 5 x 2 each; the usual one is 10.
    lengths = [10] + [2] * 20
    cost = [20.0] + [2.0] * 20
    unusual, usual = partition_by_total(list(range(21)), cost, lengths, 2, 10)
    assert [micro_cost(cost, micro) for micro in unusual] == [4.0, 20.0, 6.0]
    assert [micro_cost(cost, micro) for micro in usual] == [10.0, 10.0, 10.0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_response_as_long_as_the_budget_delays_nobody(ranks, seed):
    """Totals within 1 % of perfect balance; in turns, the others wait for its micro-batch."""
    lengths = [16384, *long_tailed(32 * ranks - 1, seed)]
    cost = [attention_cost(tokens) for tokens in lengths]
    everything = list(range(len(lengths)))
    apart = partition_by_total(everything, cost, lengths, ranks, 16384)
    together = partition_by_micro_batch(everything, cost, lengths, ranks, 16384)
    mean = sum(cost) / ranks
    assert max(total(cost, micros) for micros in apart) < 1.01 * mean
    turns = zip(*together, strict=True)
    assert sum(max(micro_cost(cost, micro) for micro in turn) for turn in turns) > 1.05 * mean


def test_totals_count_where_nothing_is_sent_between_micro_batches():
    def chosen(dp_shard=2, **changes):
        return partitioner_for(fsdp_config(dp_shard=dp_shard, dp_replicate=2, **changes))

    full, sharded = Accumulation.full, Accumulation.sharded
    assert chosen(reshard_after_forward=False, accumulation=full) is partition_by_total
    assert chosen(reshard_after_forward=False, accumulation=sharded) is partition_by_micro_batch
    assert chosen(reshard_after_forward=True, accumulation=full) is partition_by_micro_batch
    assert chosen(dp_shard=1, accumulation=sharded) is partition_by_total
