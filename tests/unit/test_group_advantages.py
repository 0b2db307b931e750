"""grpo, dr_grpo, rloo, opo, reinforce_plus_plus_baseline: hand-worked, and how they relate."""

import math

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.group_advantages import (
    GROUP_EPS,
    dr_grpo,
    grpo,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)

# Group 7: outcomes 1, 0, 5 with 1, 3 and 2 tokens. Group 2: 4, 2 with 3 and 1.
GROUP = torch.tensor([7, 2, 7, 7, 2])
LENGTHS = torch.tensor([1, 3, 3, 2, 1])
OUTCOMES = torch.tensor([1.0, 4.0, 0.0, 5.0, 2.0], dtype=torch.float64)
MASK = torch.arange(3) < LENGTHS[:, None]
# The outcome stands on the last token, but for 1 of it on the first token of the second response.
REWARDS = torch.zeros(5, 3, dtype=torch.float64)
REWARDS[torch.arange(5), LENGTHS - 1] = OUTCOMES
REWARDS[1] = torch.tensor([1.0, 0.0, 3.0])


def on_tokens(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None] * MASK


def test_grpo_hand_worked():
    # Means 2 and 3, deviations over n - 1: sqrt((1 + 4 + 9) / 2) = sqrt(7) and sqrt((1 + 1) / 1).
    found = grpo(REWARDS, MASK, GROUP)
    assert found.returns is None
    seven, two = math.sqrt(7), math.sqrt(2)
    expected = on_tokens([-1 / seven, 1 / two, -2 / seven, 3 / seven, -1 / two])
    torch.testing.assert_close(found.advantages, expected, atol=2e-6, rtol=0)


def test_grpo_keeps_its_bits_whatever_the_padding_and_the_order():
    before = grpo(REWARDS, MASK, GROUP).advantages
    padded = torch.cat([REWARDS, torch.full((5, 3), torch.nan, dtype=torch.float64)], 1)
    mask = torch.cat([MASK, torch.zeros(5, 3, dtype=torch.bool)], 1)
    order = torch.tensor([2, 0, 3, 1, 4])
    after = grpo(padded[order], mask[order], GROUP[order]).advantages
    assert torch.equal(after[:, :3], before[order])
    assert (after[:, 3:] == 0).all()


def test_grpo_counts_a_response_without_tokens_as_reward_zero():
    # Rewards 0 and 1: mean 0.5, std sqrt(0.5).
    rewards = torch.tensor([[0.0, 9.0], [0.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[False, False], [True, True]])
    advantages = grpo(rewards, mask, torch.zeros(2, dtype=torch.int64)).advantages
    assert (advantages[0] == 0).all()
    assert advantages[1].tolist() == pytest.approx([0.5 / math.sqrt(0.5)] * 2, abs=1e-5)


def test_dr_grpo_hand_worked():
    # Means 2 and 3.
    found = dr_grpo(REWARDS, MASK, GROUP)
    assert found.returns is None
    torch.testing.assert_close(found.advantages, on_tokens([-1, 1, -2, 3, -1]))


def test_rloo_hand_worked():
    # Means of the others: (0 + 5) / 2, 2, (1 + 5) / 2, (1 + 0) / 2, 4.
    found = rloo(REWARDS, MASK, GROUP)
    assert found.returns is None
    torch.testing.assert_close(found.advantages, on_tokens([-1.5, 2, -3, 4.5, -2]))


def test_opo_hand_worked():
    # Baselines (1 * 1 + 3 * 0 + 2 * 5) / 6 = 11/6 and (3 * 4 + 1 * 2) / 4 = 3.5.
    found = opo(REWARDS, MASK, GROUP)
    assert found.returns is None
    torch.testing.assert_close(found.advantages, on_tokens([-5 / 6, 0.5, -11 / 6, 19 / 6, -1.5]))


def test_reinforce_plus_plus_baseline_hand_worked():
    # On tokens: -1 | 1 1 1 | -2 -2 -2 | 3 3 | -1. Sum 1, squares 1 + 3 + 12 + 18 + 1 = 35 of 10.
    found = reinforce_plus_plus_baseline(REWARDS, MASK, GROUP)
    assert found.returns is None
    scaled = [(a - 0.1) / math.sqrt(3.5 - 0.01 + 1e-8) for a in (-1, 1, -2, 3, -1)]
    torch.testing.assert_close(found.advantages, on_tokens(scaled))


def test_opo_is_dr_grpo_for_responses_of_one_length():
    mask = torch.ones_like(MASK)
    torch.testing.assert_close(
        opo(REWARDS, mask, GROUP).advantages, dr_grpo(REWARDS, mask, GROUP).advantages
    )


def test_a_group_of_equal_rewards_is_zero_but_where_the_batch_is_whitened():
    rewards = REWARDS.clone()
    rewards[1], rewards[4] = torch.tensor([0.0, 0.0, 0.7]), torch.tensor([0.7, 0.0, 0.0])
    for function in (grpo, dr_grpo, rloo, opo):
        assert (function(rewards, MASK, GROUP).advantages[GROUP == 2] == 0).all()
    # On tokens: -1 | 0 0 0 | -2 -2 -2 | 3 3 | 0. Sum -1, squares 1 + 12 + 18 = 31 of 10.
    whitened = reinforce_plus_plus_baseline(rewards, MASK, GROUP).advantages
    expected = 0.1 / math.sqrt(3.1 - 0.01 + 1e-8)
    assert whitened[GROUP == 2][MASK[GROUP == 2]].tolist() == pytest.approx([expected] * 4)


def test_two_responses_of_one_token():
    rewards, mask = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1, dtype=torch.bool)
    group = torch.zeros(2, dtype=torch.int64)
    # Mean 1/2, deviation over n - 1 sqrt(1/2), over n 1/2.
    assert dr_grpo(rewards, mask, group).advantages.tolist() == [[0.5], [-0.5]]
    assert opo(rewards, mask, group).advantages.tolist() == [[0.5], [-0.5]]
    assert rloo(rewards, mask, group).advantages.tolist() == [[1.0], [-1.0]]
    std = 0.5 / (math.sqrt(0.5) + GROUP_EPS)
    assert grpo(rewards, mask, group).advantages.flatten().tolist() == pytest.approx([std, -std])
    whitened = reinforce_plus_plus_baseline(rewards, mask, group).advantages
    assert whitened.flatten().tolist() == pytest.approx([1.0, -1.0])
