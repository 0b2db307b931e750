"""pass@k against all subsets, and what groups, rules and intervals are made of."""

from itertools import combinations
from statistics import fmean

import pytest

from hybridrl.commands.evaluation.results import group_result, pass_at_k
from hybridrl.trainer.evaluate import half_width


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_one(n):
    for c in range(n + 1):
        correct = [index < c for index in range(n)]
        for k in range(1, n + 1):
            share = fmean(any(chosen) for chosen in combinations(correct, k))
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_stays_exact_with_many_samples():
    # 1 - C(990, 100) / C(1000, 100), as a product of its ratios
    none = 1.0
    for index in range(100):
        none *= (990 - index) / (1000 - index)
    assert pass_at_k(1000, 10, 100) == pytest.approx(1 - none, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 5), (4, 0, 0), (4, 5, 1), (4, -1, 1)])
def test_out_of_range_is_named(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


# Two samples each of four problems.
SCORES = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.5, 1.0]]


def test_results_are_means_over_problems():
    everyone = group_result("", "all", SCORES, [1, 2], 1.0)
    hard = group_result("strict", "hard", [SCORES[1], SCORES[3]], [1, 2], 1.0)
    assert (everyone["problems"], hard["problems"]) == (4, 2)
    assert (everyone["rule"], hard["rule"]) == ("reward", "strict")
    # Problem means 0.5, 0, 1, 0.75; correct 1, 0, 2, 1 of 2.
    assert everyone["score"] == 2.25 / 4
    assert everyone["pass_at"]["1"] == (0.5 + 0 + 1 + 0.5) / 4
    assert everyone["pass_at"]["2"] == 3 / 4
    assert hard["pass_at"]["2"] == 1 / 2


def test_intervals_are_of_the_spread_over_problems():
    # pass@1 is 0.5, 0, 1, 0.5: variance 1/8; 1.96 sqrt(1/8 / 4)
    width = group_result("", "all", SCORES, [1], 1.0)["pass_at_ci95"]["1"]
    assert width == pytest.approx(1.96 * (1 / 32) ** 0.5)


def test_the_interval_of_all_or_nothing_is_wilsons():
    # pass@2 is 1, 0, 1, 1: Wilson's interval of 3 in 4 is 0.3006 to 0.9544.
    width = group_result("", "all", SCORES, [2], 1.0)["pass_at_ci95"]["2"]
    assert width == pytest.approx(0.75 - 0.3006, abs=1e-4)
    # None of n: from 0 to z^2 / (n + z^2).
    assert half_width([0.0] * 500) == pytest.approx(3.8416 / 503.8416)
    assert half_width([1.0] * 500) == pytest.approx(3.8416 / 503.8416)
    # Of many in the middle it is the normal approximation's.
    assert half_width([0.0, 1.0] * 5000) == pytest.approx(1.96 * 0.5 / 100, rel=1e-3)


def test_threshold_decides_what_is_correct():
    assert group_result("", "all", SCORES, [1], 0.5)["pass_at"]["1"] == (0.5 + 0 + 1 + 1) / 4
