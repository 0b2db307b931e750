"""pass_at_k: hand-worked, the paper's analytic form, listing all sets, limits, bad input."""

import itertools
import math
import statistics

import pytest
import torch

from hybridrl.algorithms.group_advantages import GROUP_EPS, pass_at_k


def advantages_of(outcomes: list[float], pass_k: int) -> list[float]:
    """Of one group, responses of one token."""
    rewards = torch.tensor(outcomes, dtype=torch.float64)[:, None]
    group = torch.zeros(len(outcomes), dtype=torch.int64)
    mask = torch.ones_like(rewards, dtype=torch.bool)
    return pass_at_k(rewards, mask, group, pass_k=pass_k).advantages.flatten().tolist()


def test_hand_worked():
    # Pairs of 1, 0, 0, 0: three of six hold the 1; mean 1/2, deviation 1/2. A 0 is in three pairs,
    # of which one holds the 1: 1/3.
    expected = [0.5 / 0.5, *[(1 / 3 - 1 / 2) / 0.5] * 3]
    assert advantages_of([1, 0, 0, 0], 2) == pytest.approx(expected, abs=1e-5)


def test_hand_worked_with_graded_rewards():
    # Pairs of 0, 1, 3 have the best 1, 3, 3: mean 7/3, deviation sqrt(8/9). Those that hold 0:
    # 1, 3; those that hold 1: 1, 3; those that hold 3: 3, 3.
    std = math.sqrt(8 / 9)
    expected = [(2 - 7 / 3) / std, (2 - 7 / 3) / std, (3 - 7 / 3) / std]
    assert advantages_of([0, 1, 3], 2) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (8, 4), (16, 5), (64, 8), (512, 32)])
def test_zeros_and_ones_give_the_papers_analytic_form(n, k):
    for negatives in {1, k - 1, k, n // 2, n - 1} & set(range(1, n)):
        mean = 1 - math.comb(negatives, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean)) + GROUP_EPS
        lost = math.comb(negatives - 1, k - 1) / math.comb(n - 1, k - 1)
        expected = [(1 - mean) / std] * (n - negatives) + [(1 - mean - lost) / std] * negatives
        found = advantages_of([1.0] * (n - negatives) + [0.0] * negatives, k)
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pass_k", [1, 2, 3, 4, 5])
def test_any_rewards_against_listing_all_sets(pass_k):
    outcomes = [0.5, -1.0, 2.25, 0.5, 7.0, 0.5, -1.0]
    sets = list(itertools.combinations(range(7), pass_k))
    best = [max(outcomes[i] for i in chosen) for chosen in sets]
    mean, std = statistics.fmean(best), statistics.pstdev(best)
    expected = [
        (statistics.fmean(r for r, s in zip(best, sets, strict=True) if i in s) - mean)
        / (std + GROUP_EPS)
        for i in range(7)
    ]
    assert advantages_of(outcomes, pass_k) == pytest.approx(expected, abs=1e-9)


def test_no_response_matters_where_every_set_has_the_same_best():
    # Two wrong among six: each set of three holds a right one.
    assert advantages_of([1, 0, 1, 1, 0, 1], 3) == [0.0] * 6
    assert advantages_of([0.1] * 6, 3) == [0.0] * 6


def test_a_larger_k_cares_less_about_easy_prompts_and_more_about_hard_ones():
    """The right responses of an easy prompt are weighed down, the one of a hard prompt is not."""
    easy, hard = [1.0] * 7 + [0.0], [1.0] + [0.0] * 7
    assert sum(map(abs, advantages_of(easy, 4))) < 0.01 * sum(map(abs, advantages_of(easy, 1)))
    ratio = sum(map(abs, advantages_of(hard, 4))) / sum(map(abs, advantages_of(hard, 1)))
    # For k = 1: A_pos = sqrt(7), as much again for the others; for k = 4: mean 1/2, A_pos = 1.
    assert ratio == pytest.approx(1 / math.sqrt(7), abs=1e-4)


@pytest.mark.parametrize(
    ("pass_k", "names"),
    [
        (0, "pass_at_k needs pass_k >= 1; got pass_k=0"),
        (3, "pass_at_k needs at least 4 responses in every group; group 0 has 3"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(pass_k, names):
    with pytest.raises(ValueError, match=names):
        advantages_of([0.0, 1.0, 1.0], pass_k)
