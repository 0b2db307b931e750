"""Advantage estimators: pure tensor functions.

Shapes:  B = responses   T = response tokens, right-padded
Units:   rewards, values, advantages and returns share the reward's unit
"""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    at_least_float32,
    check_mask,
    check_same_shape,
    masked_whiten,
)


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
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
        advantages: [B, T] float32 (float64 for float64 input), 0 off the mask, not whitened.
        returns: [B, T] likewise, advantages + values on the mask, 0 off it.

    Raises:
        ValueError: the tensors are not of one shape [B, T], the mask is not bool, or gamma or
            lam is out of range.

    Source: Schulman et al. 2016, section 3, https://arxiv.org/abs/1506.02438
    """
    check_same_shape("gae", rewards=rewards, values=values, response_mask=response_mask)
    check_mask("gae", response_mask)
    if rewards.dim() != 2:
        raise ValueError(f"gae needs tensors [B, T]; got shape {tuple(rewards.shape)}")
    if not (0 < gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gae needs 0 < gamma <= 1 and 0 <= lam <= 1; got {gamma=}, {lam=}")

    off_mask = ~response_mask
    rewards = at_least_float32(rewards).masked_fill(off_mask, 0.0)
    values = at_least_float32(values).masked_fill(off_mask, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = torch.zeros_like(next_value)
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = next_advantage
    returns = advantages + values
    return advantages.masked_fill(off_mask, 0.0), returns.masked_fill(off_mask, 0.0)


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
