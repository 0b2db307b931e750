"""Advantage estimators for single responses: GAE, REINFORCE++, ReMax; penalty for length.

Estimators are pure functions. The trainer passes tensors and settings by parameter name, so all
estimators use the same names. config/estimators.py maps values of `algorithm.advantage` to them.
Estimators that compare the responses to one prompt are in group_advantages.py.

Shapes:  B = responses   T = response tokens, right-padded
Units:   rewards, values and returns share the reward's unit
Masks:   values off the mask are never read
Errors:  a ValueError if shapes do not fit, the mask is not bool, a setting is out of range, or a
         number on the mask is not finite

    rewards           [B, T] per-token reward, KL penalty already applied
    response_mask     [B, T] bool, true on tokens the policy sampled
    values            [B, T] critic's estimate of the return from token t onward
    baseline_rewards  [B] outcome of the greedy response to the same prompt, without KL penalty
    group_id          [B] int, responses of one prompt share it
    gamma             discount per response token, in (0, 1]
    lam               bias-variance trade-off, in [0, 1]; 1 is Monte Carlo, 0 is one-step TD
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    WrongReturn,
    at_least_float32,
    check_finite,
    check_masked,
    check_same_shape,
    described,
    masked_whiten,
)


class Estimate(NamedTuple):
    """Advantages, and returns for a critic.

    Attributes:
        advantages: [B, T] float32 (float64 for float64 input), 0 off the mask; whitened only if
            the method's definition whitens.
        returns: [B, T] likewise, the critic's targets; None if the estimator has no critic.
    """

    advantages: Tensor
    returns: Tensor | None


def as_estimate(result: Any, function: str, mask: Tensor, values: Tensor | None) -> Estimate:
    """Convert the result of `function`: (advantages, returns), or advantages alone.

    Without returns, those of a critic, whose `values` are given, are advantages + values.

    Raises:
        WrongReturn: advantages or returns are no float tensor of the shape [B, T] of the mask.
    """
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    advantages, returns = result if is_pair else (result, None)
    tensors = [advantages] if returns is None else [advantages, returns]
    if not all(
        isinstance(t, Tensor) and t.is_floating_point() and t.shape == mask.shape for t in tensors
    ):
        raise WrongReturn(
            f"{function} returned {described(result)}, expected advantages, or (advantages, "
            f"returns), each a float32 Tensor of shape {tuple(mask.shape)}, [responses, tokens] as "
            f"rewards.\nFor one value per response, return values[:, None] * response_mask."
        )
    tensors = [at_least_float32(tensor.detach()) for tensor in tensors]
    if returns is None and values is not None:
        tensors.append((tensors[0] + values).masked_fill(~mask, 0.0))
    return Estimate(tensors[0], tensors[1] if len(tensors) == 2 else None)


def check_rewards(function: str, rewards: Tensor, response_mask: Tensor, **others: Tensor) -> None:
    """Raise a ValueError unless all are [B, T], the mask bool, and the rest finite on the mask."""
    check_masked(function, response_mask, rewards=rewards, **others)
    if rewards.dim() != 2:
        raise ValueError(f"{function} needs tensors [B, T]; got shape {tuple(rewards.shape)}")
    check_finite(function, response_mask, rewards=rewards, **others)


def outcomes(function: str, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B] float64, the sum of each response's token rewards; 0 without response tokens."""
    check_rewards(function, rewards, response_mask)
    return rewards.masked_fill(~response_mask, 0.0).sum(1, dtype=torch.float64)


def on_every_token(values: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B, T], each response's value [B] on all its tokens, 0 off the mask.

    The dtype is float32, or float64 for float64 rewards.
    """
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return values.to(dtype)[:, None].expand_as(rewards).masked_fill(~response_mask, 0.0)


Arguments = ParamSpec("Arguments")
# Attribute of an estimator: its form for blocks of whole groups, which the trainer calls.
GROUP_WISE = "group_wise"


def group_wise(function: Callable[Arguments, Estimate]) -> Callable[Arguments, Estimate]:
    """Mark an estimator whose advantages of a response depend on the response's group alone.

    The trainer calls it on blocks of whole groups, so the batch is never padded as a whole.
    """
    function.group_wise = function  # type: ignore[attr-defined]
    return function


def whitened(function: Callable[Arguments, Estimate]) -> Callable[Arguments, Estimate]:
    """Make an estimator that whitens the advantages of a group-wise one over the batch.

    Called directly it whitens over all response tokens. The trainer whitens over those that count
    in the policy loss, before the batch is partitioned over ranks.
    """

    @wraps(function)
    def whole(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Estimate:
        advantages, returns = function(*args, **kwargs)
        mask = signature(function).bind(*args, **kwargs).arguments["response_mask"]
        return Estimate(
            masked_whiten(advantages, mask) if bool(mask.any()) else advantages, returns
        )

    whole.group_wise = function  # type: ignore[attr-defined]
    return whole


@group_wise
def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> Estimate:
    """Compute generalized advantage estimation (GAE) over the tokens of each response.

    A_t = delta_t + gamma * lam * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t

    Here t+1 is the next response token: tokens off the mask (padding, tool output) are skipped.
    A response is a complete episode, so V and A after its last token are 0. Returns are
    advantages + values on the mask.

    Source: Schulman et al. 2016, section 3, https://arxiv.org/abs/1506.02438
    """
    check_rewards("gae", rewards, response_mask, values=values)
    if not (0 < gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gae needs 0 < gamma <= 1 and 0 <= lam <= 1; got {gamma=}, {lam=}")
    off_mask = ~response_mask
    rewards = at_least_float32(rewards).masked_fill(off_mask, 0.0)
    values = at_least_float32(values).masked_fill(off_mask, 0.0)
    order = None
    if bool((off_mask[:, :-1] & response_mask[:, 1:]).any()):
        # Response tokens first: then the next column is the next response token.
        order = off_mask.to(torch.uint8).argsort(dim=1, stable=True)
        rewards, values = rewards.gather(1, order), values.gather(1, order)
    next_values = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    deltas = rewards + gamma * next_values - values
    advantages = _discounted_sums(deltas, gamma * lam)
    if order is not None:
        advantages = torch.zeros_like(advantages).scatter_(1, order, advantages)
        values = torch.zeros_like(values).scatter_(1, order, values)
    # Off the mask both terms are 0.
    return Estimate(advantages, advantages + values)


def _discounted_sums(deltas: Tensor, discount: float) -> Tensor:
    """Return [B, T] S_t = d_t + discount * S_{t+1}, backwards from the last token."""
    # Time-major, so that each iteration reads contiguous memory. numpy is three times as fast as
    # torch on these short vectors.
    by_token = deltas.detach().cpu().numpy().T.copy()
    later, discounted = by_token[-1:].reshape(-1), np.empty(len(deltas), by_token.dtype)
    for here in by_token[-2::-1]:
        np.multiply(later, discount, out=discounted)
        np.add(here, discounted, out=here)
        later = here
    return torch.from_numpy(by_token.T.copy()).to(deltas.device)


@whitened
def reinforce_plus_plus(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Estimate:
    """Compute REINFORCE++ advantages: each token's discounted return, whitened over the batch.

    G_t = r_t + gamma * G_{t+1},   A_t = (G_t - mean) / std

    Here t+1 is the next response token: tokens off the mask are skipped. mean and std (over N, with
    1e-8 added to the variance) are those of G over the batch. A is 0 if all G are equal. With the
    k1 penalty in the reward and gamma = 1, G_t is the outcome minus the penalties from t on.

    verl divides the variance by N - 1 and resets the return at tokens off the mask: tokens before
    tool output then ignore later rewards. OpenRLHF's estimator is the same for gamma = 1.

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
    """Compute ReMax advantages: the outcome minus that of the greedy response to the same prompt.

    A_{i,t} = r_i - b_i

    Here r_i is the sum of response i's token rewards, and b_i the outcome of the greedy response.
    All tokens t of a response share one advantage.

    Source: Li et al. 2024, algorithm 1, https://arxiv.org/abs/2310.10505
    """
    outcome = outcomes("remax", rewards, response_mask)
    check_same_shape("remax", outcomes=outcome, baseline_rewards=baseline_rewards)
    everywhere = torch.ones_like(baseline_rewards, dtype=torch.bool)
    check_finite("remax", everywhere, baseline_rewards=baseline_rewards)
    return Estimate(on_every_token(outcome - baseline_rewards, rewards, response_mask), None)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Compute DAPO's soft overlong punishment, linear over the last `buffer` tokens.

    0                      if         L <= M - C
    ((M - C) - L) / C      if M - C < L <= M
    -1                     if     M < L

    L = lengths, [B] tokens of each response; M = max_tokens, from which the penalty is -1;
    C = buffer, 1 to M. Returns [B] float32 (float64 for float64 lengths), in the reward's unit.

    Source: Yu et al. 2025 (DAPO), equation 13, https://arxiv.org/abs/2503.14476
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(
            f"overlong_penalty needs 1 <= buffer <= max_tokens; got {buffer=}, {max_tokens=}"
        )
    if lengths.dim() != 1 or not (lengths >= 0).all():
        raise ValueError(
            f"overlong_penalty needs lengths [B] of at least 0 tokens; got shape "
            f"{tuple(lengths.shape)} with {lengths[~(lengths >= 0)].tolist()}"
        )
    begins = max_tokens - buffer
    return ((begins - at_least_float32(lengths)) / buffer).clamp(-1.0, 0.0)
