"""KL estimators against exact divergences of a categorical; penalty; adaptive coefficient."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.losses import (
    MAX_LOG_RATIO,
    adapt_coef,
    estimate_kl,
    kl_penalty_rewards,
)
from hybridrl.config.choices import KLEstimator

k1, k2, k3 = (partial(estimate_kl, estimator=KLEstimator(name)) for name in ("k1", "k2", "k3"))
P = [0.5, 0.3, 0.15, 0.05]
Q = [0.25, 0.25, 0.1, 0.4]
LOG_P = torch.tensor(P, dtype=torch.float64).log()
LOG_Q = torch.tensor(Q, dtype=torch.float64).log()
EXACT_KL = math.fsum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))


def expectation(values: Tensor) -> float:
    """Under P, by enumeration."""
    return math.fsum(p * value for p, value in zip(P, values.tolist(), strict=True))


def test_hand_worked():
    # d = ln 2: k1 = .6931, k2 = .6931^2 / 2 = .2402, k3 = 1/2 - 1 + .6931 = .1931
    log_p, log_q = torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)])
    assert k1(log_p, log_q).item() == pytest.approx(0.693147, abs=1e-6)
    assert k2(log_p, log_q).item() == pytest.approx(0.240227, abs=1e-6)
    assert k3(log_p, log_q).item() == pytest.approx(0.193147, abs=1e-6)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    assert expectation(estimator(LOG_P, LOG_Q)) == pytest.approx(EXACT_KL, rel=1e-12)


def test_k2_is_biased():
    exact = math.fsum(p * math.log(p / q) ** 2 / 2 for p, q in zip(P, Q, strict=True))
    assert expectation(k2(LOG_P, LOG_Q)) == pytest.approx(exact, rel=1e-12)
    assert abs(exact - EXACT_KL) > 0.05


def test_k3_varies_less_than_k1_near_the_reference():
    near = torch.log_softmax(LOG_P + torch.tensor([0.01, -0.02, 0.03, 0.02]), dim=0)
    first, third = k1(LOG_P, near), k3(LOG_P, near)

    def variance(values: Tensor) -> float:
        return expectation(values.square()) - expectation(values) ** 2

    assert variance(third) < variance(first) / 100


def test_k2_and_k3_are_never_negative_not_even_by_rounding():
    difference = torch.cat([10.0 ** -torch.arange(0.0, 12.0), -(10.0 ** -torch.arange(0.0, 12.0))])
    zeros = torch.zeros_like(difference)
    assert (k2(difference, zeros) >= 0).all()
    assert (k3(difference, zeros) >= 0).all()


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_equal_policies_have_no_divergence(estimator):
    assert estimate_kl(LOG_P, LOG_P, estimator).tolist() == [0.0] * 4


def test_k3_keeps_small_differences_in_float32():
    # d^2 / 2 = 5e-9 would vanish in exp(-d) - 1 + d: float32 has steps of 6e-8 near 1.
    value = k3(torch.tensor([1e-4]), torch.tensor([0.0])).item()
    assert value == pytest.approx(5e-9, rel=0.01)


def test_k3_stays_finite_where_the_reference_is_far_likelier():
    value = k3(torch.tensor([-100.0]), torch.tensor([0.0])).item()
    assert value == pytest.approx(math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO, rel=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k2, KLEstimator.k3])
def test_gradcheck(estimator):
    log_p = LOG_P.clone().requires_grad_()
    log_q = LOG_Q.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p, q: estimate_kl(p, q, estimator), (log_p, log_q))


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_shapes_must_agree(estimator):
    with pytest.raises(ValueError, match=r"\(4,\).*\(3,\)"):
        estimate_kl(LOG_P, LOG_Q[:3], estimator)


def test_penalty_hand_worked():
    # r = score - .1 * d with d = (.5, -.2, 0)
    rewards = kl_penalty_rewards(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([-0.5, -1.2, -2.0]),
        torch.tensor([-1.0, -1.0, -2.0]),
        0.1,
        KLEstimator.k1,
    )
    torch.testing.assert_close(rewards, torch.tensor([-0.05, 0.02, 1.0]))


def test_penalty_bad_input_is_named():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="scores"):
        kl_penalty_rewards(one, two, two, 0.1, KLEstimator.k1)
    with pytest.raises(ValueError, match=r"coef=-0\.1"):
        kl_penalty_rewards(two, two, two, -0.1, KLEstimator.k1)
    with pytest.raises(ValueError, match="coef=nan"):
        kl_penalty_rewards(two, two, two, math.nan, KLEstimator.k1)


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # error 0.1, times 100 / 1000
        (5.4, 0.099),
        (60.0, 0.102),  # error 9 clipped to 0.2
        (-1.0, 0.098),  # error below -1 clipped to -0.2
    ],
)
def test_adapt_coef_hand_worked(current, expected):
    coef = adapt_coef(0.1, current=current, target=6.0, horizon=1000, num_responses=100)
    assert coef == pytest.approx(expected, rel=1e-12)


def test_adapt_coef_holds_a_simple_plant_at_its_target():
    """Where KL = 1 / coef, the controller ends at coef = 1 / target from either side."""
    for coef in (0.01, 10.0):
        for _ in range(2000):
            coef = adapt_coef(coef, current=1 / coef, target=4.0, horizon=200, num_responses=20)
        assert coef == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"target": 0.0}, "target=0.0"),
        ({"target": math.inf}, "target=inf"),
        ({"current": math.nan}, "current=nan"),
        ({"horizon": 0}, "horizon=0"),
        ({"horizon": 20}, "horizon=20"),  # 1 - 0.2 * 100 / 20 = 0
        ({"num_responses": 0}, "num_responses=0"),
    ],
)
def test_adapt_coef_out_of_range_is_named(change, names):
    good = {"current": 6.0, "target": 6.0, "horizon": 1000, "num_responses": 100}
    with pytest.raises(ValueError, match=names):
        adapt_coef(0.1, **(good | change))


def test_adapt_coef_refuses_a_negative_coefficient():
    with pytest.raises(ValueError, match="coef=-1"):
        adapt_coef(-1.0, current=6.0, target=6.0, horizon=1000, num_responses=100)
