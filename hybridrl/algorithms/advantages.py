"""Advantage estimators: pure tensor functions.

Which tensors and settings an estimator takes is said by its parameters' names, the same in all of
them; config/estimators.py lists the estimators by the names that `algorithm.advantage` takes.

Shapes:  B = responses   T = response tokens, right-padded
Units:   rewards, values and returns share the reward's unit
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    at_least_float32,
    check_mask,
    check_same_shape,
    masked_whiten,
)

# Added to a group's standard deviation before it divides, in the reward's unit.
GROUP_EPS = 1.0e-6


class Estimate(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: [B, T] float32 (float64 for float64 input), 0 off the mask, not whitened.
        returns: [B, T] likewise, the critic's targets; None of estimators without a critic.
    """

    advantages: Tensor
    returns: Tensor | None


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
    # Tokens come first, so that each turn of the loop reads and writes neighbours in memory.
    by_token = rewards.T.contiguous(), values.T.contiguous(), response_mask.T.contiguous()
    next_value = rewards.new_zeros(len(rewards))
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(by_token[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        reward, value, here = (tensor[t] for tensor in by_token)
        delta = reward + gamma * next_value - value
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        advantages[t] = next_advantage
    result = advantages.T.masked_fill(off_mask, 0.0)
    return Estimate(result, (result + values).masked_fill(off_mask, 0.0))


def grpo(rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> Estimate:
    """Group-relative advantages: each response against the others to the same prompt.

    A_{i,t} = (r_i - mean_g) / (std_g + GROUP_EPS), the same for every response token t of i,
    where r_i is the sum of the response's token rewards, and mean_g and std_g (the sample's, over
    n - 1) are those of the n responses of i's group. A group of equal rewards has advantages 0.

    Args:
        rewards: [B, T] per-token reward; usually an outcome on the last token.
        response_mask: [B, T] bool, true on tokens the policy sampled.
        group_id: [B] int, responses of one prompt share it.

    Returns:
        Advantages without unit, 0 off the mask; no returns.

    Raises:
        ValueError: the tensors' shapes do not fit, the mask is not bool, or a group has a single
            response, which nothing can be compared with.

    Source: Shao et al. 2024, section 4.1.2, https://arxiv.org/abs/2402.03300
    """
    check_same_shape("grpo", rewards=rewards, response_mask=response_mask)
    check_mask("grpo", response_mask)
    check_groups("grpo", rewards, group_id)
    outcome = at_least_float32(rewards).masked_fill(~response_mask, 0.0).sum(1)
    _, group = group_id.unique(return_inverse=True)
    count = group.bincount()
    if bool((count < 2).any()):
        raise ValueError("grpo needs at least two responses in every group; one has a single one")
    # Relative to a member of the group, equal rewards are exactly 0, whatever they round to.
    outcome = outcome - outcome[_first_of_each(group, len(count))[group]]
    centred = outcome - _sum_by(group, outcome, len(count))[group] / count[group]
    std = (_sum_by(group, centred.square(), len(count)) / (count - 1)).sqrt()
    relative = centred / (std[group] + GROUP_EPS)
    return Estimate(relative[:, None].expand_as(rewards).masked_fill(~response_mask, 0.0), None)


def check_groups(function: str, rewards: Tensor, group_id: Tensor) -> None:
    """Raise a ValueError unless rewards are [B, T] and every response has a group."""
    if rewards.dim() != 2 or group_id.shape != rewards.shape[:1]:
        raise ValueError(
            f"{function} needs rewards [B, T] and group_id [B]; got shapes "
            f"{tuple(rewards.shape)} and {tuple(group_id.shape)}"
        )


def _first_of_each(group: Tensor, num_groups: int) -> Tensor:
    """[G]: the first member of each group."""
    members = torch.arange(len(group))
    return members.new_zeros(num_groups).scatter_reduce(
        0, group, members, "amin", include_self=False
    )


def _sum_by(group: Tensor, values: Tensor, num_groups: int) -> Tensor:
    """[G]: the sum of each group's values."""
    return values.new_zeros(num_groups).index_add_(0, group, values)


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
