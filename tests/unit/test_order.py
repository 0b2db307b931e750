"""The order of training: even shares, passes that hold each problem once, easy before hard."""

from collections import Counter
from fractions import Fraction
from itertools import chain, islice, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.sources.order import most_drawn, pacing, shares, shuffled, whole_weights

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 20), st.sampled_from([0.5, 0.25, 0.7, 0.001, 1.5])),
    min_size=1,
    max_size=5,
)
SIZES = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def permutations(size: int, seeds: list[int]) -> list[list[int]]:
    """A permutation for each seed: the problems sorted by some hash of seed and problem."""
    return [sorted(range(size), key=lambda i: (i * 7919 + seed) * 104729 % 1009) for seed in seeds]


def test_shares_by_hand():
    # Weights 2 and 1; a draw goes to whoever is behind by at least 1/2 and, of those, has least
    # time. Draw 1: the first is behind by 2/3, the second by 1/3. Draw 2: 1/3 and 2/3.
    # Draw 3: 1 and 0. Then all begins anew.
    assert list(islice(shares([2, 1]), 9)) == [0, 1, 0] * 3
    # Equal weights take turns.
    assert list(islice(shares([1, 1]), 4)) == [0, 1, 0, 1]
    assert Counter(islice(shares([1, 2, 1]), 4)) == {0: 1, 1: 2, 2: 1}
    assert list(islice(shares([5]), 3)) == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_counts_are_the_shares_rounded_down_or_up_after_every_draw(weights):
    parts = [Fraction(str(weight)) for weight in weights]
    drawn = [0] * len(parts)
    for n, index in enumerate(islice(shares(weights), 120), start=1):
        drawn[index] += 1
        for part, x in zip(parts, drawn, strict=True):
            off = abs(n * part / sum(parts) - x)
            assert off < 1
            assert off <= 1 - Fraction(1, max(1, 2 * len(parts) - 2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 3))
def test_shares_are_exact_after_every_round_of_whole_weights(weights, rounds):
    parts = whole_weights(weights)
    drawn = Counter(islice(shares(weights), rounds * sum(parts)))
    assert [drawn[index] for index in range(len(parts))] == [rounds * part for part in parts]


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(1, 12))
def test_no_window_holds_more_than_most_drawn(weights, window):
    indices = list(islice(shares(weights), 150))
    for index in range(len(weights)):
        most = most_drawn(weights, index, window)
        found = max(indices[k : k + window].count(index) for k in range(len(indices) - window))
        assert found <= most <= window


def test_whole_weights_take_decimals_as_they_look():
    assert whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_weights([2, 4]) == [1, 2]
    assert whole_weights([1e-3, 1]) == [1, 1000]


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("inf")], [float("nan")]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="positive"):
        whole_weights(weights)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.integers(0, 10**6), min_size=4, max_size=4))
def test_every_pass_is_a_permutation_and_windows_hold_no_problem_twice(sizes, seeds):
    size, distinct = sizes
    drawn = list(islice(shuffled(permutations(size, seeds), distinct, lambda _: size), 4 * size))
    for number in range(4):
        assert sorted(drawn[number * size : (number + 1) * size]) == list(range(size))
    assert all(
        len(set(drawn[k : k + distinct])) == distinct for k in range(len(drawn) - distinct + 1)
    )


def test_a_pass_follows_its_permutation_where_nothing_holds_it_up():
    passes = [[2, 0, 1, 3], [3, 1, 0, 2]]
    assert list(shuffled(passes, 1, lambda _: 4)) == [2, 0, 1, 3, 3, 1, 0, 2]
    # With windows of 3 the second pass cannot begin with 3 or 1: these came last.
    # 0 comes first, then 1 may (two others lie between), then 3, then 2.
    assert list(shuffled(passes, 3, lambda _: 4)) == [2, 0, 1, 3, 0, 1, 3, 2]


def test_harder_problems_join_by_hand():
    # 20 problems over 36 draws, beginning with a tenth: 2 + drawn / 2 are admitted.
    admitted = pacing(20, 1, Fraction(36))
    assert [admitted(drawn) for drawn in (0, 1, 2, 4, 35, 36, 1000)] == [2, 2, 3, 4, 19, 20, 20]
    assert pacing(20, 5, Fraction(36))(0) == 5
    assert pacing(20, 5, Fraction(0))(0) == 20
    # In order of the permutation 0, 1, 2, ... all of it: 0 1, then 2 (admitted after two draws);
    # nothing is left after three, so a pass begins: 0 1 2, and so on.
    drawn = list(islice(shuffled(repeat(list(range(20))), 1, admitted), 8))
    assert drawn == [0, 1, 2, 0, 1, 2, 3, 4]


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 60), st.lists(st.integers(0, 10**6), min_size=3, max_size=3))
def test_curriculum_draws_only_what_is_admitted_and_keeps_windows_distinct(sizes, length, seeds):
    size, distinct = sizes
    admitted = pacing(size, distinct, Fraction(length))
    passes = chain(permutations(size, seeds), repeat(list(range(size))))
    drawn = list(islice(shuffled(passes, distinct, admitted), 120))
    assert all(problem < admitted(position) for position, problem in enumerate(drawn))
    assert all(
        len(set(drawn[k : k + distinct])) == distinct for k in range(len(drawn) - distinct + 1)
    )
    assert set(drawn) == set(range(size))
