"""Advantage estimators that look at each response by itself: pure tensor functions.

Which tensors and settings an estimator takes is said by its parameters' names, the same in all of
them; config/estimators.py lists the estimators by the names that `algorithm.advantage` takes. Those
that compare the responses to a prompt are in group_advantages.py and pass_at_k.py.

Shapes:  B = responses   T = response tokens, right-padded
Units:   rewards, values and returns share the reward's unit
Errors:  what is NaN or infinite on the mask is refused; what stands off it is never read
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import NamedTuple, ParamSpec

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    at_least_float32,
    check_finite,
    check_mask,
    check_same_shape,
    masked_whiten,
)
from hybridrl.algorithms.outcomes import check_rewards, on_every_token, outcomes


class Estimate(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: [B, T] float32 (float64 for float64 input), 0 off the mask; whitened only where
            the method's own definition says so.
        returns: [B, T] likewise, the critic's targets; None of estimators without a critic.
    """

    advantages: Tensor
    returns: Tensor | None


Arguments = ParamSpec("Arguments")
# Attribute of an estimator: the function that the trainer calls on blocks of whole groups.
GROUP_WISE = "group_wise"


def group_wise(function: Callable[Arguments, Estimate]) -> Callable[Arguments, Estimate]:
    """Mark an estimator in which a response's advantages depend on its group alone.

    The trainer then calls it on blocks of whole groups, or of any responses if it takes no
    group_id, and never pads the batch as a whole.
    """
    function.group_wise = function  # type: ignore[attr-defined]
    return function


def whitened(function: Callable[Arguments, Estimate]) -> Callable[Arguments, Estimate]:
    """Make an estimator that whitens over the batch what a group-wise one estimates.

    By itself it whitens over all response tokens; the trainer does so over those that count in the
    policy loss.
    """

    @wraps(function)
    def whole(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Estimate:
        advantages, returns = function(*args, **kwargs)
        mask = signature(function).bind(*args, **kwargs).arguments["response_mask"]
        return Estimate(whiten(advantages, mask) if bool(mask.any()) else advantages, returns)

    whole.group_wise = function  # type: ignore[attr-defined]
    return whole


@group_wise
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> Estimate:
    """Generalized advantage estimation over the response tokens of each sample.

    A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t,
    where t+1 is the next response token: masked tokens (padding, tool output) are stepped over.
    A response is a complete episode, so V and A after its last token are 0. A row without any
    response token is 0 throughout.

    Args:
        rewards: [B, T] per-token reward, KL penalty already applied.
        values: [B, T] critic's estimate of the return from token t onward.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        gamma: discount per response token, in (0, 1].
        lam: bias-variance trade-off, in [0, 1]; 1 is Monte Carlo, 0 is one-step TD.

    Returns:
        Advantages in the reward's unit; returns, which are advantages + values on the mask.

    Raises:
        ValueError: the tensors are not of one shape [B, T], the mask is not bool, a reward or
            value on the mask is not finite, or gamma or lam is out of range.

    Source: Schulman et al. 2016, section 3, https://arxiv.org/abs/1506.02438
    """
    check_same_shape("gae", rewards=rewards, values=values, response_mask=response_mask)
    check_mask("gae", response_mask)
    if rewards.dim() != 2:
        raise ValueError(f"gae needs tensors [B, T]; got shape {tuple(rewards.shape)}")
    if not (0 < gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gae needs 0 < gamma <= 1 and 0 <= lam <= 1; got {gamma=}, {lam=}")
    check_finite("gae", response_mask, rewards=rewards, values=values)

    off_mask = ~response_mask
    rewards = at_least_float32(rewards).masked_fill(off_mask, 0.0)
    values = at_least_float32(values).masked_fill(off_mask, 0.0)
    order = None
    if bool((off_mask[:, :-1] & response_mask[:, 1:]).any()):
        # Without what is stepped over, the next response token stands next.
        order = off_mask.to(torch.uint8).argsort(dim=1, stable=True)
        rewards, values = rewards.gather(1, order), values.gather(1, order)
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    deltas = rewards + gamma * next_values - values
    advantages = _discounted_sums(deltas, gamma * lam)
    if order is not None:
        advantages = torch.zeros_like(advantages).scatter_(1, order, advantages)
        values = torch.zeros_like(values).scatter_(1, order, values)
    # Off the mask both are 0: nothing was added up there.
    return Estimate(advantages, advantages + values)


def _discounted_sums(deltas: Tensor, discount: float) -> Tensor:
    """[B, T]: d_t + discount * d_{t+1} + discount^2 * d_{t+2} + ..., each from the sum after it."""
    # Tokens come first, so that each turn of the loop reads and writes neighbours in memory; numpy
    # takes a third of torch's time for as many short vectors.
    by_token = deltas.detach().cpu().numpy().T.copy()
    later, discounted = by_token[-1:].reshape(-1), np.empty(len(deltas), by_token.dtype)
    for here in by_token[-2::-1]:
        np.multiply(later, discount, out=discounted)
        np.add(here, discounted, out=here)
        later = here
    return torch.from_numpy(by_token.T.copy()).to(deltas.device)


@whitened
def reinforce_plus_plus(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Estimate:
    """REINFORCE++: each token's discounted return, whitened over the batch.

    G_t = r_t + gamma * G_{t+1},   A_t = (G_t - mean) / std,
    where t+1 is the next response token: masked tokens are stepped over. mean and std (over N, with
    1e-8 added to the variance) are those of G over the batch (`whitened`). With the k1
    penalty in the reward and gamma = 1, G_t is the outcome less the penalties from t on.

    verl takes the variance over N - 1, and drops the return at a masked token, so that tokens
    before tool output get nothing of what comes after it. OpenRLHF's is the same for gamma = 1.

    Args:
        rewards: [B, T] per-token reward, KL penalty already applied.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        gamma: discount per response token, in (0, 1].

    Returns:
        Advantages without unit, 0 off the mask and 0 throughout if all G are equal; no returns.

    Raises:
        ValueError: the tensors are not of one shape [B, T], the mask is not bool, a reward on the
            mask is not finite, or gamma is out of range.

    Source: Hu et al. 2025, REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    check_rewards("reinforce_plus_plus", rewards, response_mask)
    if not 0 < gamma <= 1:
        raise ValueError(f"reinforce_plus_plus needs 0 < gamma <= 1; got {gamma=}")
    # Without values, Monte Carlo advantages are the returns.
    returns, _ = gae(rewards, torch.zeros_like(rewards), response_mask, gamma=gamma, lam=1.0)
    return Estimate(returns, None)


@group_wise
def remax(rewards: Tensor, response_mask: Tensor, baseline_rewards: Tensor) -> Estimate:
    """ReMax: each response against the greedy one to the same prompt.

    A_{i,t} = r_i - b_i, the same for every response token t of i, where r_i is the sum of i's token
    rewards and b_i the outcome of the response that greedy decoding gives to i's prompt.

    verl sums the rewards from t on instead, which differs where tokens before the last have one:
    with the KL penalty in the reward.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        baseline_rewards: [B] the greedy response's outcome, without KL penalty.

    Returns:
        Advantages in the reward's unit, 0 off the mask; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, or a reward on the mask or
            a baseline is not finite.

    Source: Li et al. 2024, algorithm 1, https://arxiv.org/abs/2310.10505
    """
    outcome = outcomes("remax", rewards, response_mask)
    check_same_shape("remax", outcomes=outcome, baseline_rewards=baseline_rewards)
    everywhere = torch.ones_like(baseline_rewards, dtype=torch.bool)
    check_finite("remax", everywhere, baseline_rewards=baseline_rewards)
    return Estimate(on_every_token(outcome - baseline_rewards, rewards, response_mask), None)


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Advantages with mean 0 and variance 1 over all response tokens of the step.

    One mean and one variance over the whole batch, all ranks: whiten before the batch is dealt.
    Advantages that are all equal (nothing to prefer) become 0.

    Args:
        advantages: [B, T], in the reward's unit.
        response_mask: [B, T] bool, true on tokens the policy sampled.

    Returns:
        [B, T] float32 (float64 for float64 input), without unit, 0 off the mask.

    Raises:
        ValueError: the shapes differ, or the mask is not bool or true nowhere.

    Source: advantage normalisation, Andrychowicz et al. 2020, https://arxiv.org/abs/2006.05990
    """
    return masked_whiten(advantages, response_mask)
