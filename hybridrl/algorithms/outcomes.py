"""Outcomes: the sum of a response's rewards, and a response's advantage spread over its tokens.

Shapes:  B = responses   T = response tokens, right-padded
Units:   outcomes share the rewards' unit
"""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import check_finite, check_mask, check_same_shape


def check_rewards(function: str, rewards: Tensor, response_mask: Tensor) -> None:
    """Raise a ValueError unless rewards and mask are [B, T] and rewards on the mask are finite."""
    check_same_shape(function, rewards=rewards, response_mask=response_mask)
    check_mask(function, response_mask)
    if rewards.dim() != 2:
        raise ValueError(f"{function} needs tensors [B, T]; got shape {tuple(rewards.shape)}")
    check_finite(function, response_mask, rewards=rewards)


def outcomes(function: str, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B] float64, the sum of each response's token rewards; 0 without response tokens.

    Args:
        function: name of the caller, for errors.
        rewards: [B, T] per-token reward.
        response_mask: [B, T] bool, true on tokens the policy sampled.

    Raises:
        ValueError: the shapes are not one [B, T], the mask is not bool, or a reward on the mask is
            NaN or infinite.
    """
    check_rewards(function, rewards, response_mask)
    return rewards.masked_fill(~response_mask, 0.0).sum(1, dtype=torch.float64)


def on_every_token(values: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B, T], each response's value [B] on all its tokens, 0 off the mask.

    The dtype is float32, or float64 for float64 rewards.
    """
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return values.to(dtype)[:, None].expand_as(rewards).masked_fill(~response_mask, 0.0)
