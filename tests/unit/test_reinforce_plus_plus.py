"""reinforce_plus_plus and remax: hand-worked, single tokens, bad input."""

import math

import pytest
import torch

from hybridrl.algorithms.advantages import reinforce_plus_plus, remax

# Penalties on the way and outcomes 1 and 0.
REWARDS = torch.tensor([[-0.2, -0.4, 1.0], [-0.5, 0.0, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])


def test_reinforce_plus_plus_hand_worked():
    # Returns with discount 1/2: 1, .5 - .4 = .1, .05 - .2 = -.15; and 0, -.5. Sum .45, squares
    # 1 + .01 + .0225 + .25 = 1.2825, of five.
    found = reinforce_plus_plus(REWARDS, MASK, gamma=0.5)
    std = math.sqrt(1.2825 / 5 - 0.09**2 + 1e-8)
    expected = [[-0.24 / std, 0.01 / std, 0.91 / std], [-0.59 / std, -0.09 / std, 0.0]]
    assert found.returns is None
    torch.testing.assert_close(found.advantages, torch.tensor(expected, dtype=torch.float64))


def test_adding_to_every_outcome_changes_nothing_without_discount():
    shifted = REWARDS.clone()
    shifted[0, 2] += 3
    shifted[1, 1] += 3
    torch.testing.assert_close(
        reinforce_plus_plus(shifted, MASK, gamma=1.0).advantages,
        reinforce_plus_plus(REWARDS, MASK, gamma=1.0).advantages,
    )


def test_a_single_token_has_nothing_to_be_better_than():
    one = torch.tensor([[3.0]])
    assert reinforce_plus_plus(one, one.bool(), gamma=1.0).advantages.tolist() == [[0.0]]


@pytest.mark.parametrize("gamma", [0.0, 1.1, math.nan])
def test_gamma_out_of_range_is_named(gamma):
    with pytest.raises(ValueError, match=f"reinforce_plus_plus needs .*gamma={gamma}"):
        reinforce_plus_plus(REWARDS, MASK, gamma=gamma)


def test_remax_hand_worked():
    # Outcomes .4 and -.5, greedy 1 and 0.
    found = remax(REWARDS, MASK, torch.tensor([1.0, 0.0]))
    assert found.returns is None
    expected = torch.tensor([[-0.6] * 3, [-0.5, -0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found.advantages, expected)


@pytest.mark.parametrize(
    ("baseline", "names"),
    [
        (torch.tensor([0.0]), r"remax needs .*baseline_rewards \(1,\)"),
        (torch.tensor([[0.0], [0.0]]), r"remax needs .*baseline_rewards \(2, 1\)"),
        (torch.tensor([0.0, math.nan]), "remax needs finite baseline_rewards; 1 of 2"),
    ],
)
def test_bad_baselines_are_named(baseline, names):
    with pytest.raises(ValueError, match=names):
        remax(REWARDS, MASK, baseline)
