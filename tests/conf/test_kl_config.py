"""algorithm.kl.estimator: where each form may act."""

import pytest
from composing import examined, problems


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_straight_through_form_in_the_reward_is_pointed_out(estimator):
    form = f"{estimator}_straight_through"
    (found,) = problems("hardware=cpu", f"algorithm.kl.estimator={form}")
    assert f"algorithm.kl.estimator = {form} with algorithm.kl.placement = reward" in found
    assert f"Set algorithm.kl.estimator={estimator}, or algorithm.kl.placement=loss." in found


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_straight_through", "k3_straight_through"])
def test_what_pulls_may_act_in_the_loss(estimator):
    overrides = ["hardware=cpu", "algorithm.kl.placement=loss"]
    found = examined([*overrides, f"algorithm.kl.estimator={estimator}"])
    assert found.report.problems == []
    assert found.config.actor.algorithm.kl.estimator == estimator


def test_k1_in_the_loss_is_offered_its_straight_through_form():
    (found,) = problems("hardware=cpu", "algorithm.kl.placement=loss")
    assert "k1_straight_through" in found


def test_without_a_penalty_nothing_is_pointed_out():
    form = "algorithm.kl.estimator=k1_straight_through"
    (found,) = problems("hardware=cpu", "algorithm.kl.coef=0", form)
    assert "has no effect with algorithm.kl.coef = 0" in found


def test_the_error_for_an_unknown_estimator_lists_all():
    (found,) = problems("hardware=cpu", "algorithm.kl.estimator=k4")
    assert "one of k1, k2, k3, k1_straight_through, k3_straight_through" in found
