"""gae: hand-worked, its two limits, the definition as a double sum, masking, bad input."""

import math

import pytest
import torch

from hybridrl.algorithms.advantages import gae

REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.2]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(5, 9, generator=generator)
    values = torch.randn(5, 9, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.6
    return rewards, values, mask


def test_hand_worked():
    # delta = (0 + .9*.4 - .5, 0 + .9*.2 - .4, 1 - .2) = (-.14, -.22, .8); gamma*lam = .45
    # A = (-.14 + .45*.14, -.22 + .45*.8, .8) = (-.077, .14, .8)
    advantages, returns = gae(REWARDS, VALUES, ALL, gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.077, 0.14, 0.8]]))
    torch.testing.assert_close(returns, torch.tensor([[0.423, 0.54, 1.0]]))


def test_lam_one_is_monte_carlo():
    # Returns are the discounted sums of rewards 2, -1, 4: 2 - .5 + 1, -1 + 2, 4.
    rewards = torch.tensor([[2.0, -1.0, 4.0]])
    _, returns = gae(rewards, VALUES, ALL, gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[2.5, 1.0, 4.0]]))


def test_lam_zero_is_one_step_td():
    advantages, _ = gae(REWARDS, VALUES, ALL, gamma=0.9, lam=0.0)
    torch.testing.assert_close(advantages, torch.tensor([[-0.14, -0.22, 0.8]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.97, 0.3), (0.5, 1.0)])
def test_against_the_definition_as_a_sum(gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over each row's own tokens, in Python floats."""
    rewards, values, mask = random_case(seed=3)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(5):
        r, v = rewards[row, mask[row]].tolist(), [*values[row, mask[row]].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        expected = [
            math.fsum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r)))
            for t in range(len(r))
        ]
        assert advantages[row, mask[row]].tolist() == pytest.approx(expected, abs=1e-5)
        assert returns[row, mask[row]].tolist() == pytest.approx(
            [a + b for a, b in zip(expected, v, strict=False)], abs=1e-5
        )


def test_masked_tokens_are_stepped_over():
    """Tool output and padding, even NaN, change no response token's advantage."""
    mask = torch.tensor([[True, False, True, True, False]])

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.full((1, 5), torch.nan).masked_scatter(mask, x)

    sparse = gae(spread(REWARDS), spread(VALUES), mask, gamma=0.9, lam=0.5)
    dense = gae(REWARDS, VALUES, ALL, gamma=0.9, lam=0.5)
    for ours, theirs in zip(sparse, dense, strict=True):
        torch.testing.assert_close(ours[mask], theirs[0])
        assert (ours[~mask] == 0).all()


def test_rows_do_not_touch_each_other():
    rewards, values, mask = random_case(seed=4)
    whole, _ = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for row in range(5):
        alone, _ = gae(*(x[row : row + 1] for x in (rewards, values, mask)), gamma=0.9, lam=0.8)
        assert torch.equal(alone[0], whole[row])


def test_a_row_without_response_tokens_is_zero():
    rewards, values, mask = random_case(seed=5)
    mask[2] = False
    for result in gae(rewards, values, mask, gamma=1.0, lam=0.9):
        assert (result[2] == 0).all()
        assert (result[mask] != 0).any()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_batches_give_empty_results(shape):
    empty, mask = torch.empty(shape), torch.empty(shape, dtype=torch.bool)
    for result in gae(empty, empty, mask, gamma=1.0, lam=1.0):
        assert result.shape == shape


def test_bfloat16_values_are_accumulated_in_float32():
    advantages, returns = gae(
        REWARDS.bfloat16(), torch.zeros(1, 3).bfloat16(), ALL, gamma=0.999, lam=1.0
    )
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(returns, torch.tensor([[0.998001, 0.999, 1.0]]))


@pytest.mark.parametrize(
    ("gamma", "lam", "names"),
    [
        (0.0, 0.5, "gamma=0.0"),
        (1.1, 0.5, "gamma=1.1"),
        (math.nan, 0.5, "gamma=nan"),
        (0.9, -0.1, "lam=-0.1"),
        (0.9, 1.1, "lam=1.1"),
    ],
)
def test_out_of_range_is_named(gamma, lam, names):
    with pytest.raises(ValueError, match=names):
        gae(REWARDS, VALUES, ALL, gamma=gamma, lam=lam)


@pytest.mark.parametrize(
    ("rewards", "values", "mask", "names"),
    [
        (REWARDS * math.nan, VALUES, ALL, "gae needs finite rewards; 3 of 3"),
        (REWARDS, VALUES / 0, ALL, "gae needs finite values; 3 of 3"),
        (REWARDS, VALUES[:, :2], ALL, r"values \(1, 2\)"),
        (REWARDS, VALUES, ALL[:, :2], r"response_mask \(1, 2\)"),
        (REWARDS, VALUES, ALL.long(), "bool"),
        (REWARDS[0], VALUES[0], ALL[0], r"\[B, T\]"),
    ],
)
def test_wrong_tensors_are_named(rewards, values, mask, names):
    with pytest.raises(ValueError, match=names):
        gae(rewards, values, mask, gamma=1.0, lam=1.0)
