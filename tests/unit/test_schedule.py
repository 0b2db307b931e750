"""schedule: each response once an epoch, equal counts on ranks, budgets kept, order restored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.balance import balance
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule
from tests.batches import batch_of


def scheduled(lengths: list[int], **changes) -> ScheduledBatch:
    sizes = {"num_ranks": 2, "mini_batch_size": 4, "epochs": 2, "max_tokens": 40}
    return schedule(batch_of(lengths), seed=1, step=3, **(sizes | changes))


@settings(max_examples=50, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    minis=st.integers(1, 3),
    epochs=st.integers(1, 3),
    budget=st.integers(5, 200),
    data=st.data(),
)
def test_what_every_schedule_must_hold(ranks, minis, epochs, budget, data):
    size = 8 * minis
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=size, max_size=size))
    plan = scheduled(lengths, num_ranks=ranks, mini_batch_size=8, epochs=epochs, max_tokens=budget)
    tokens = plan.batch.num_tokens
    for epoch in range(epochs):
        seen = [i for rank in plan.ranks for mini in rank[epoch] for micro in mini for i in micro]
        assert sorted(seen) == list(range(size))
        for mini in range(minis):
            per_rank = [rank[epoch][mini] for rank in plan.ranks]
            assert len({len(micros) for micros in per_rank}) == 1
            assert {sum(map(len, micros)) for micros in per_rank} == {8 // ranks}
            for micro in (micro for micros in per_rank for micro in micros):
                assert len(micro) == 1 or tokens[micro].sum() <= budget
                assert micro


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


def test_mini_batches_of_a_rank_are_its_micro_batches():
    rank = scheduled([5, 1, 7, 3, 2, 9, 4, 8]).shard(2)[0]
    minis = list(rank.mini_batches())
    assert len(minis) == 2 * 2
    first = [micro.group_id.tolist() for mini in minis[:2] for micro in mini]
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
