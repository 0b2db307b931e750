"""Trials of own estimators and losses: what is accepted, what is refused, and in which words."""

import pytest
import torch

from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.app.own_algorithms import toy_batch, try_estimator, try_loss
from hybridrl.config.annotations import NoValue
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.errors import RunStopped
from tests.support.run_configs import run_config


def outcome(rewards):
    return rewards.sum(1, keepdim=True)


def alone(rewards, response_mask):
    return outcome(rewards) * response_mask


def pair(rewards, response_mask, gamma):
    return alone(rewards, response_mask) * gamma, None


def half(rewards, values):
    return (rewards - values).to(torch.bfloat16)


def of_responses(rewards):
    return rewards.sum(1)


def integers(rewards):
    return rewards.long()


def triple(rewards):
    return rewards, rewards, {}


def wrong_returns(rewards, values):
    return rewards, values[:1]


def nothing(rewards): ...


def unmixed(rewards, response_mask, group_id):
    """Divides by the deviation of a group's rewards, which may be 0."""
    advantages = torch.zeros_like(rewards)
    for group in group_id.unique():
        mine = outcome(rewards)[group_id == group]
        advantages[group_id == group] = (mine - mine.mean()) / mine.std()
    return advantages


def tried(function, **settings):
    config = run_config().algorithm
    config.advantage = f"{__name__}.{function.__name__}"
    vars(config).update(settings)
    return [*try_estimator("algorithm.advantage", config.advantage, config, 4)]


@pytest.mark.parametrize("function", [alone, pair, half])
def test_an_estimators_result_is_accepted(function):
    assert tried(function) == []


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (of_responses, "a Tensor of shape (12,), float32"),
        (integers, "a Tensor of shape (12, 5), int64"),
        (triple, "a tuple (a Tensor of shape (12, 5), float32, a Tensor"),
        (wrong_returns, "a tuple (a Tensor of shape (12, 5), float32, a Tensor of shape (1, 5)"),
        (nothing, "None"),
    ],
)
def test_an_estimators_wrong_result_is_named_with_what_is_expected(function, returned):
    (problem,) = tried(function)
    assert problem.startswith(f"algorithm.advantage = {__name__}.{function.__name__} returned ")
    assert f"returned {returned}" in problem
    assert "float32 Tensor of shape (12, 5), [responses, tokens]" in problem


def test_a_group_without_mixed_rewards_is_part_of_the_trial():
    with pytest.raises(RunStopped, match="needs finite advantages"):
        tried(unmixed)


def test_without_a_setting_there_is_no_trial():
    config = run_config().algorithm
    config.gamma = NoValue("algorithm.gamma")
    assert [*try_estimator("key", f"{__name__}.nothing", config, 4)] == []


def test_advantages_alone_give_the_critic_returns():
    config = run_config().algorithm
    config.advantage, config.whiten_advantages = f"{__name__}.half", False
    batch = toy_batch(4)
    found = AdvantageEstimator(config).estimate(batch, batch.scores)
    torch.testing.assert_close(
        found["returns"].values, found["advantages"].values + batch.values.values
    )
    assert found["returns"].values.dtype == torch.float32


def test_the_small_batch_has_what_mistakes_show_on():
    batch = toy_batch(4)
    groups = [batch.scores.pad(0.0).sum(1)[batch.group_id == g] for g in batch.group_id.unique()]
    assert len(set(batch.responses.lengths.tolist())) == 5
    assert [group.unique().tolist() for group in groups] == [[0.0, 1.0], [0.0, 1.0], [1.0]]
    assert len(toy_batch(1)) >= 9 and len(toy_batch(64)) == 3 * 64


def token_losses(log_probs, advantages, *, scale):
    return -scale * advantages * log_probs


def with_metrics(log_probs, advantages, response_mask, *, scale):
    return TokenLoss(
        token_losses(log_probs, advantages, scale=scale), {"mine": response_mask.sum()}
    )


def mean(log_probs, *, scale):
    return log_probs.mean()


def detached(log_probs, *, scale):
    return log_probs.detach()


def not_finite(log_probs, *, scale):
    return (log_probs - 9.0).log()


def per_token(log_probs, *, scale):
    return log_probs, {"mine": log_probs}


def tried_loss(function, **args):
    config = run_config().algorithm
    path = f"{__name__}.{function.__name__}"
    config.loss.function, config.loss.args = path, args
    return [*try_loss("algorithm.loss.function", path, config)]


@pytest.mark.parametrize("function", [token_losses, with_metrics])
def test_a_losss_result_is_accepted(function):
    assert tried_loss(function, scale=2.0) == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (mean, "returned a Tensor of shape (), float32, expected the loss of each token"),
        (detached, "returned a loss without gradient"),
        (not_finite, "computed a loss that is NaN or infinite"),
        (per_token, "returned the sum mine as a Tensor of shape (27,)"),
    ],
)
def test_a_losss_wrong_result_is_named(function, words):
    (problem,) = tried_loss(function, scale=1.0)
    assert problem.startswith(f"algorithm.loss.function = {__name__}.{function.__name__} ")
    assert words in problem


def test_a_missing_setting_is_left_to_its_own_problem():
    assert tried_loss(mean) == []
