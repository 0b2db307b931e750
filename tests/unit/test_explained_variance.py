"""explained_variance from sums over tokens, against its definition."""

import pytest
import torch

from hybridrl.workers.critic import explained_variance, moments

RETURNS = torch.tensor([1.0, 2.0, 4.0, 100.0])
MASK = torch.tensor([True, True, True, False])


def of(values):
    sums = moments(RETURNS, torch.tensor(values), MASK)
    return explained_variance(**{name: float(value) / 3 for name, value in sums.items()})


def test_perfect_values():
    assert of([1.0, 2.0, 4.0, float("nan")]) == pytest.approx(1.0)


def test_a_constant_error_costs_nothing():
    assert of([3.0, 4.0, 6.0, 0.0]) == pytest.approx(1.0)


def test_constant_values_explain_nothing():
    assert of([7.0, 7.0, 7.0, 0.0]) == pytest.approx(0.0)


def test_hand_worked():
    # errors (1, 0, 0): variance 2/9; returns (1, 2, 4): variance 14/9
    assert of([0.0, 2.0, 4.0, 0.0]) == pytest.approx(1 - 2 / 14)


def test_returns_that_do_not_vary():
    assert explained_variance(returns=2.0, returns_2=4.0, errors=1.0, errors_2=3.0) == 0.0
