"""Outcomes: the sum of a response's rewards, its penalty for length, its spread over tokens.

Shapes:  B = responses   T = response tokens, right-padded
Units:   outcomes share the rewards' unit
"""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_finite, check_masked


def check_rewards(function: str, rewards: Tensor, response_mask: Tensor, **others: Tensor) -> None:
    """Raise a ValueError unless all are [B, T], the mask bool, and the rest finite on the mask."""
    check_masked(function, response_mask, rewards=rewards, **others)
    if rewards.dim() != 2:
        raise ValueError(f"{function} needs tensors [B, T]; got shape {tuple(rewards.shape)}")
    check_finite(function, response_mask, rewards=rewards, **others)


def outcomes(function: str, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B] float64, the sum of each response's token rewards; 0 without response tokens.

    Raises:
        ValueError: as `check_rewards`; it begins with the name of the calling `function`.
    """
    check_rewards(function, rewards, response_mask)
    return rewards.masked_fill(~response_mask, 0.0).sum(1, dtype=torch.float64)


def on_every_token(values: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B, T], each response's value [B] on all its tokens, 0 off the mask.

    The dtype is float32, or float64 for float64 rewards.
    """
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return values.to(dtype)[:, None].expand_as(rewards).masked_fill(~response_mask, 0.0)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Compute DAPO's soft overlong punishment, linear over the last `buffer` tokens.

    0                      if         L <= M - C
    ((M - C) - L) / C      if M - C < L <= M
    -1                     if     M < L

    Here L = lengths, M = max_tokens, C = buffer. A response truncated at M gets -1.

    Args:
        lengths: [B] tokens of each response, integer or floating, >= 0.
        max_tokens: length from which the penalty is -1; rollout.max_response_tokens or less.
        buffer: tokens before max_tokens over which the penalty grows, 1 to max_tokens.

    Returns:
        [B] in [-1, 0], float32 (float64 for float64 lengths), in the unit of the reward.

    Raises:
        ValueError: lengths or buffer is none of these.

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
