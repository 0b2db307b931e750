"""KL control: where the penalty acts, and that an adaptive coefficient moves after the step."""

from dataclasses import replace

import pytest
import torch

from hybridrl.config.choices import KLEstimator, KLPlacement
from hybridrl.config.sections import KLConfig
from hybridrl.trainer.advantage import KLControl
from tests.support.batches import batch_of


def control(placement: str, schedule: str, coef: float = 0.1) -> KLControl:
    config = KLConfig(
        placement=KLPlacement(placement),
        estimator=KLEstimator.k1,
        coef=coef,
        target=0.01 if schedule == "adaptive" else None,
        horizon=20,
    )
    return KLControl(config)


def scored():
    """Two responses of two tokens; log(pi/ref) is 0.5 on the last token of each."""
    batch = batch_of([2, 2])
    like = batch.responses.like
    return batch.adding(
        scores=like(torch.tensor([0.0, 1.0, 0.0, 0.0])),
        old_log_probs=like(torch.tensor([-1.0, -1.0, -1.0, -1.0])),
        ref_log_probs=like(torch.tensor([-1.0, -1.5, -1.0, -1.5])),
    )


def test_penalty_in_the_reward_hand_worked():
    rewards = control("reward", "fixed").rewards(scored())
    torch.testing.assert_close(rewards.values, torch.tensor([0.0, 0.95, 0.0, -0.05]))


def test_tokens_that_the_policy_did_not_sample_are_not_penalised():
    batch = scored()
    mask = batch.responses.like(torch.tensor([True, True, True, False]))
    rewards = control("reward", "fixed").rewards(replace(batch, response_mask=mask))
    torch.testing.assert_close(rewards.values, torch.tensor([0.0, 0.95, 0.0, 0.0]))


def test_penalty_in_the_loss_leaves_rewards_alone():
    kl = control("loss", "fixed")
    assert kl.rewards(scored()).values.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert kl.loss_coef == 0.1
    assert control("reward", "fixed").loss_coef == 0.0


def test_adaptive_coefficient_reports_what_the_step_used_and_then_moves():
    kl = control("loss", "adaptive")
    metrics = kl.adapt(scored())
    assert metrics["actor/kl_coef"] == 0.1
    # k3 of d = 0.5: exp(-0.5) - 1 + 0.5 = 0.10653 on half of the tokens
    assert metrics["actor/kl"] == pytest.approx(0.10653 / 2, abs=1e-5)
    # KL per response 0.107 is far above 0.01: the error is clipped at 0.2, times 2 / 20
    assert kl.loss_coef == pytest.approx(0.1 * 1.02)


def test_an_adaptive_coefficient_counts_episodes_not_sequences():
    kl = control("loss", "adaptive")
    batch = scored()
    kl.adapt(replace(batch, episode=torch.tensor([0, 0])))
    assert kl.loss_coef == pytest.approx(0.1 * 1.01)  # 1 / 20 instead of 2 / 20


def test_tokens_that_nobody_sampled_are_no_part_of_the_kl():
    batch = scored()
    mask = batch.responses.like(torch.tensor([False, True, True, False]))
    kl = control("loss", "adaptive")
    # k3 of 0.5 on one of two sampled tokens; 0.053 nats per response still clip the error
    metrics = kl.adapt(replace(batch, response_mask=mask))
    assert metrics["actor/kl"] == pytest.approx(0.10653 / 2, abs=1e-5)
    none = batch.responses.like(torch.tensor([True, False, True, False]))
    unmoved = control("loss", "adaptive")
    assert unmoved.adapt(replace(batch, response_mask=none))["actor/kl"] == 0.0
    # and now 0 lies below the target: the error is clipped at -0.2
    assert unmoved.loss_coef == pytest.approx(0.1 * 0.98)


def test_without_reference_nothing_is_taken_off():
    for placement in ("reward", "loss"):
        kl = control(placement, "fixed", coef=0.0)
        assert kl.rewards(scored()).values.tolist() == [0.0, 1.0, 0.0, 0.0]
        assert kl.loss_coef == 0.0
        assert kl.adapt(scored()) == {"actor/kl": None, "actor/kl_coef": None}
