"""What is computed of a step for the policy loss: by config, and on the batch's own tokens."""

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.trainer.advantage import LossInputs
from tests.support.batches import batch_of
from tests.support.run_configs import run_config

LENGTHS = [3, 1, 4]


def batch(**fields) -> RolloutBatch:
    """Three responses; the trainer finds every token twice as likely as the sampler did."""
    plain = batch_of(LENGTHS)
    old = plain.rollout_log_probs.values + torch.tensor(2.0).log()
    advantages = plain.responses.like(torch.arange(8.0))
    return plain.adding(
        old_log_probs=plain.responses.like(old),
        advantages=advantages,
        truncated=torch.tensor([False, False, True]),
        **fields,
    )


def fields_of(*overrides: str, step: int = 1, **fields):
    config = run_config(*overrides)
    return LossInputs(config.algorithm, config.seed).of_step(batch(**fields), step)


def test_by_default_ratios_are_truncated_at_two_and_all_tokens_count():
    fields, metrics = fields_of()
    assert set(fields) == {"loss_weights"}
    assert fields["loss_weights"].values.tolist() == pytest.approx([2.0] * 8)
    assert metrics["rollout/correction_weight_mean"] == pytest.approx(2.0)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(-0.6931, abs=1e-4)


def test_a_lower_cap_is_met_and_counted():
    fields, metrics = fields_of("algorithm.rollout_correction.high=1.5")
    assert fields["loss_weights"].values.tolist() == pytest.approx([1.5] * 8)
    assert metrics["rollout/corrected_fraction"] == 1.0


def test_masked_sequences_are_left_out_by_their_own_ratio():
    # ratios of responses: 8, 2 and 16
    fields, metrics = fields_of(
        "algorithm.rollout_correction.method=mask",
        "algorithm.rollout_correction.level=sequence",
        "algorithm.rollout_correction.high=9",
    )
    weights = [row.tolist() for row in fields["loss_weights"].rows()]
    assert weights[0] == pytest.approx([8.0] * 3) and weights[1] == pytest.approx([2.0])
    assert weights[2] == [0.0] * 4
    assert metrics["rollout/corrected_fraction"] == 0.5


def test_no_correction_sends_nothing_and_still_measures():
    fields, metrics = fields_of("algorithm.rollout_correction.method=none")
    assert fields == {}
    assert set(metrics) == {
        f"rollout/mismatch_{name}" for name in ("kl", "kl_k3", "chi2_token", "chi2_sequence", "ess")
    }


def test_a_loss_against_the_sampler_is_not_corrected_again():
    fields, _ = fields_of("algorithm/loss=dppo_tv")
    assert fields == {}


def test_selected_tokens_are_those_with_the_largest_covariance():
    # Log-probs fall as advantages rise, by response: covariances are largest at the middle.
    fields, metrics = fields_of("algorithm/loss=kl_cov", "algorithm.loss.args.fraction=0.25")
    chosen = fields["selected"].values
    whole = batch()
    log_probs, advantages = whole.old_log_probs.values, whole.advantages.values
    covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    assert chosen.sum() == 2
    assert covariance[chosen].min() >= covariance[~chosen].max()
    assert metrics["actor/covariance_max"] == pytest.approx(float(covariance.max()))


def test_tokens_are_selected_of_those_that_count():
    """Without the last response, whose advantages are far above, covariances are others."""
    overrides = ["algorithm/loss=kl_cov", "algorithm.loss.args.fraction=0.5"]
    counted = torch.arange(8) < 4
    mask = batch_of(LENGTHS).responses.like(counted)
    fields, metrics = fields_of(*overrides, loss_mask=mask)
    whole = batch()
    log_probs, advantages = whole.old_log_probs.values[counted], whole.advantages.values[counted]
    covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    chosen = fields["selected"].values
    assert not chosen[~counted].any()
    assert chosen.sum() == 2
    assert covariance[chosen[counted]].min() >= covariance[~chosen[counted]].max()
    assert metrics["actor/covariance_max"] == pytest.approx(float(covariance.max()))


def test_where_nothing_counts_nothing_is_selected():
    nothing = batch_of(LENGTHS).responses.like(torch.zeros(8, dtype=torch.bool))
    fields, _ = fields_of("algorithm/loss=kl_cov", loss_mask=nothing)
    assert not fields["selected"].values.any()


def test_the_draw_of_clip_cov_depends_on_seed_and_step_alone():
    def drawn(step: int, seed: int) -> list[bool]:
        overrides = ["algorithm/loss=clip_cov", f"seed={seed}", "algorithm.loss.args.fraction=0.25"]
        overrides += ["algorithm.loss.args.cov_low=-100", "algorithm.loss.args.cov_high=100"]
        return fields_of(*overrides, step=step)[0]["selected"].values.tolist()

    assert drawn(1, 1) == drawn(1, 1)
    assert sum(drawn(1, 1)) == 2
    assert len({tuple(drawn(step, seed)) for step in range(5) for seed in range(5)}) > 10
