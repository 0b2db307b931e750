"""AdvantageEstimator: the named function gets what it takes; whitening; the listed estimators."""

import inspect
from dataclasses import replace

import pytest
import torch

from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, SETTINGS, TENSORS, estimator_of
from hybridrl.config.sections import AlgorithmConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.trainer.advantage import AdvantageEstimator, value_metrics
from hybridrl.trainer.errors import RunStopped
from tests.support.batches import batch_of
from tests.support.run_configs import run_config

COMPOSED = run_config().algorithm


def config(advantage: str, whiten: bool = False) -> AlgorithmConfig:
    own = {"advantage": advantage, "gamma": 0.5, "lam": 1.0, "pass_k": 1}
    return replace(COMPOSED, **own, whiten_advantages=whiten)


def scored():
    """Two responses to one prompt, of 3 and 1 tokens, with outcomes 2 and 0 and values of 1."""
    batch = batch_of([3, 1])
    like = batch.responses.like
    scores = like(torch.tensor([0.0, 0.0, 2.0, 0.0]))
    values = like(torch.ones(4))
    group_id = torch.zeros(2, dtype=torch.int64)
    return batch.adding(group_id=group_id, scores=scores, values=values)


def doubled(rewards, group_id, response_mask, gamma, extra=2.0):
    """An estimator of a user's, with a setting of its own."""
    assert group_id.tolist() == [0, 0] and gamma == 0.5
    assert response_mask.tolist() == [[True, True, True], [True, False, False]]
    return extra * rewards, None


def test_gae_gets_values_discount_and_lambda():
    batch = scored()
    found = AdvantageEstimator(config("gae")).estimate(batch, batch.scores)
    # Returns with discount 1/2: 0.5, 1, 2 and 0; less the values of 1.
    assert found["returns"].values.tolist() == [0.5, 1.0, 2.0, 0.0]
    assert found["advantages"].values.tolist() == [-0.5, 0.0, 1.0, -1.0]


def test_grpo_needs_no_values_and_returns_no_targets():
    batch = batch_of([3, 1])
    batch = batch.adding(group_id=torch.zeros(2, dtype=torch.int64))
    found = AdvantageEstimator(config("grpo")).estimate(batch, scored().scores)
    # 2 and 0: mean 1, std sqrt(2).
    assert list(found) == ["advantages"]
    assert found["advantages"].values.tolist() == pytest.approx([2**-0.5] * 3 + [-(2**-0.5)])


def test_remax_gets_the_greedy_responses_outcomes():
    batch = scored()
    batch = batch.adding(baseline_rewards=torch.tensor([0.5, 1.0]))
    found = AdvantageEstimator(config("remax")).estimate(batch, batch.scores)
    # Outcomes 2 and 0.
    assert found["advantages"].values.tolist() == [1.5, 1.5, 1.5, -1.0]


def test_pass_at_k_gets_its_setting():
    found = AdvantageEstimator(config("pass_at_k")).estimate(scored(), scored().scores)
    # k = 1: mean 1 and deviation 1 of 2 and 0.
    assert found["advantages"].values.tolist() == pytest.approx([1.0] * 3 + [-1.0], abs=1e-5)


def test_whitening_covers_the_response_tokens_of_the_batch():
    found = AdvantageEstimator(config("gae", whiten=True)).estimate(scored(), scored().scores)
    # -0.5, 0, 1, -1: mean -1/8, variance (1/4 + 1 + 1) / 4 - 1/64 = 35/64.
    std = (35 / 64) ** 0.5
    expected = [(a + 0.125) / std for a in (-0.5, 0.0, 1.0, -1.0)]
    assert found["advantages"].values.tolist() == pytest.approx(expected, abs=1e-6)


def test_whitening_leaves_out_what_does_not_count_in_the_loss():
    batch = scored()
    counts = batch.responses.like(torch.tensor([True, True, True, False]))
    found = AdvantageEstimator(config("gae", whiten=True)).estimate(
        batch.adding(loss_mask=counts), batch.scores
    )
    # -0.5, 0, 1: mean 1/6, variance (1/4 + 1) / 3 - 1/36 = 14/36.
    std = (14 / 36) ** 0.5
    expected = [(a - 1 / 6) / std for a in (-0.5, 0.0, 1.0)]
    assert found["advantages"].values[:3].tolist() == pytest.approx(expected, abs=1e-6)


def test_where_nothing_counts_advantages_stay_as_they_are():
    batch = scored()
    nothing = batch.responses.like(torch.zeros(4, dtype=torch.bool))
    found = AdvantageEstimator(config("gae", whiten=True)).estimate(
        batch.adding(loss_mask=nothing), batch.scores
    )
    assert found["advantages"].values.tolist() == pytest.approx([-0.5, 0.0, 1.0, -1.0])


def test_an_estimator_by_dotted_path():
    path = f"{__name__}.doubled"
    found = AdvantageEstimator(config(path)).estimate(scored(), scored().scores)
    assert found["advantages"].values.tolist() == [0.0, 0.0, 4.0, 0.0]
    assert not estimator_of(path).uses_critic
    assert estimator_of(path).compares_groups


def not_finite(rewards):
    """A user's estimator with a mistake."""
    return rewards / 0, None


def test_advantages_that_are_not_finite_stop_the_run():
    message = r"policy loss after .*\.not_finite needs finite advantages; 4 of 4"
    with pytest.raises(RunStopped, match=message):
        AdvantageEstimator(config(f"{__name__}.not_finite")).estimate(scored(), scored().scores)


@pytest.mark.parametrize("name", BUILT_IN_ESTIMATORS)
def test_the_list_of_estimators_agrees_with_the_functions(name):
    listed = BUILT_IN_ESTIMATORS[name]
    function = locate("algorithm.advantage", listed.path)
    more = ("shares",) * listed.compares_turns
    assert tuple(inspect.signature(function).parameters) == listed.takes + more
    assert set(listed.takes) <= {*TENSORS, *SETTINGS}


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="importing nowhere failed"):
        estimator_of("nowhere.estimate")


def test_values_and_returns_by_hand():
    batch = scored()
    batch = batch.adding(returns=batch.responses.like(torch.tensor([1.0, 2.0, 3.0, 6.0])))
    assert value_metrics(batch) == {"critic/value_mean": 1.0, "critic/return_mean": 3.0}
