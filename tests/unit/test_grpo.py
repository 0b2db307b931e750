"""grpo: hand-worked, a float64 reference on ragged groups, invariances, bad input."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.group_advantages import GROUP_EPS, grpo

ALL = torch.ones(4, 2, dtype=torch.bool)


def outcomes(values: list[float], width: int = 2) -> torch.Tensor:
    """[B, T] rewards with each outcome on the last token."""
    rewards = torch.zeros(len(values), width, dtype=torch.float64)
    rewards[:, -1] = torch.tensor(values, dtype=torch.float64)
    return rewards


def test_hand_worked():
    # Group 7: 1, 0, 0, 3 with mean 1, squared distances 0 + 1 + 1 + 4 = 6, std sqrt(6 / 3).
    # Group 2: 5, 1 with mean 3, std sqrt(8).
    rewards = outcomes([1, 5, 0, 0, 1, 3])
    group_id = torch.tensor([7, 2, 7, 7, 2, 7])
    mask = torch.ones(6, 2, dtype=torch.bool)
    advantages, returns = grpo(rewards, mask, group_id)
    root = math.sqrt(2)
    expected = [0, 2 / (2 * root), -1 / root, -1 / root, -2 / (2 * root), 2 / root]
    assert returns is None
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=2e-6)
    assert torch.equal(advantages[:, 0], advantages[:, 1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5))
def test_against_a_float64_reference(seed, sizes):
    """Responses of random lengths and masks, groups of random sizes in random order."""
    generator = torch.Generator().manual_seed(seed)
    names = [100 - group for group, size in enumerate(sizes) for _ in range(size)]
    order = torch.randperm(len(names), generator=generator)
    group_id = torch.tensor(names)[order]
    rewards = torch.randn(len(names), 7, generator=generator)
    mask = torch.rand(len(names), 7, generator=generator) < 0.6
    advantages, _ = grpo(rewards.masked_fill(~mask, torch.nan), mask, group_id)
    total = [
        math.fsum(float(r) for r, kept in zip(row, keep, strict=True) if kept)
        for row, keep in zip(rewards.tolist(), mask.tolist(), strict=True)
    ]
    for b, name in enumerate(group_id.tolist()):
        group = [total[k] for k, other in enumerate(group_id.tolist()) if other == name]
        expected = (total[b] - statistics.fmean(group)) / (statistics.stdev(group) + GROUP_EPS)
        assert advantages[b, mask[b]].tolist() == pytest.approx(
            [expected] * int(mask[b].sum()), abs=1e-4
        )
        assert (advantages[b, ~mask[b]] == 0).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_a_group_of_equal_rewards_is_exactly_zero(value):
    rewards = torch.zeros(5, 2)
    rewards[:, 1] = value
    rewards[4, 1] = value + 1
    mask = torch.ones(5, 2, dtype=torch.bool)
    advantages, _ = grpo(rewards, mask, torch.tensor([0, 0, 0, 1, 1]))
    assert (advantages[:3] == 0).all()
    assert (advantages[3:] != 0).all()


def test_shifting_a_groups_rewards_changes_nothing():
    rewards, group_id = outcomes([0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    shifted = rewards + torch.tensor([0.0, 0.0, 8.0, 8.0], dtype=torch.float64)[:, None] / 2
    before, _ = grpo(rewards, ALL, group_id)
    after, _ = grpo(shifted, ALL, group_id)
    torch.testing.assert_close(before, after)


def test_padding_and_order_change_nothing():
    rewards, group_id = outcomes([0, 1, 2, 0]), torch.tensor([0, 1, 0, 1])
    before, _ = grpo(rewards, ALL, group_id)
    padded = torch.cat([rewards, torch.full((4, 3), torch.nan, dtype=torch.float64)], 1)
    mask = torch.cat([ALL, torch.zeros(4, 3, dtype=torch.bool)], 1)
    order = torch.tensor([2, 0, 3, 1])
    after, _ = grpo(padded[order], mask[order], group_id[order])
    assert torch.equal(after[:, :2], before[order])
    assert (after[:, 2:] == 0).all()


def test_a_response_without_tokens_counts_as_reward_zero():
    # Rewards 0 and 1: mean 0.5, std sqrt(0.5).
    mask = torch.tensor([[False, False], [True, True]])
    advantages, _ = grpo(outcomes([9, 1]), mask, torch.zeros(2, dtype=torch.int64))
    assert (advantages[0] == 0).all()
    assert advantages[1].tolist() == pytest.approx([0.5 / math.sqrt(0.5)] * 2, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "mask", "group_id", "names"),
    [
        (outcomes([0, 1, 2, 3]), ALL, torch.tensor([0, 0, 0, 1]), "group 1 has 1"),
        (outcomes([0, 1, 2, 3]), ALL, torch.tensor([0, 0, 1]), r"group_id \[B\]"),
        (outcomes([0, 1, 2, 3]), ALL[:, :1], torch.tensor([0, 0, 1, 1]), r"response_mask \(4, 1\)"),
        (outcomes([0, 1, 2, 3]), ALL.long(), torch.tensor([0, 0, 1, 1]), "bool"),
    ],
)
def test_bad_input_is_named(rewards, mask, group_id, names):
    with pytest.raises(ValueError, match=names):
        grpo(rewards, mask, group_id)


def test_no_responses_give_no_advantages():
    empty = torch.empty(0, 3)
    advantages, _ = grpo(empty, empty.bool(), torch.empty(0, dtype=torch.int64))
    assert advantages.shape == (0, 3)
