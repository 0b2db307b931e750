"""PPO's losses: sums over response tokens divided by a token count that the caller gives.

The count is that of the whole mini-batch on all ranks, so that losses of parts add up to the loss
of the whole, however its responses fall on ranks and micro-batches.

Shapes:  N = response tokens of a micro-batch; all tensors [N] (any one shape will do)
"""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import check_same_shape, masked_sum

# Detached sums over tokens, by name; the caller adds them up over ranks and divides.
Sums = dict[str, Tensor]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio: float,
    num_tokens: float,
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate, negated: a scalar to minimise.

        r_t = exp(log_probs - old_log_probs)
        L   = -sum_t min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t) / num_tokens

    Args:
        log_probs: nats, with a gradient.
        old_log_probs: nats, of the policy that sampled.
        advantages: any unit.
        mask: bool, true on tokens that count; anything may stand elsewhere.
        clip_ratio: c, in (0, 1).
        num_tokens: tokens that count in the whole mini-batch, > 0.

    Returns:
        The loss, and sums: ratio_mean (of r_t), ppo_kl (k1 of old against new policy), and
        clip_fraction (tokens whose gradient the clip removes).

    Raises:
        ValueError: shapes differ, or clip_ratio or num_tokens is out of range.

    Source: Schulman et al. 2017, equation 7, https://arxiv.org/abs/1707.06347
    """
    check_same_shape(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask
    )
    _check_positive(num_tokens)
    if not 0 < clip_ratio < 1:
        raise ValueError(f"policy_loss needs 0 < clip_ratio < 1; got {clip_ratio=}")
    log_ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages
    sums = {
        "ratio_mean": masked_sum(ratio.detach(), mask),
        "ppo_kl": -log_ratio.detach().sum(),
        "clip_fraction": (clipped < plain).sum(),
    }
    return -torch.minimum(plain, clipped).sum() / num_tokens, sums


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float,
    num_tokens: float,
) -> tuple[Tensor, Sums]:
    """Squared error of the values, clipped like the policy: a scalar to minimise.

        V'_t = V_old + clip(V_t - V_old, -c, c)
        L    = 1/2 sum_t max((V_t - R_t)^2, (V'_t - R_t)^2) / num_tokens

    Args:
        values: V_t, reward unit, with a gradient.
        old_values: V_old, of the critic before this step's updates.
        returns: R_t, the targets.
        mask: bool, true on tokens that count; anything may stand elsewhere.
        value_clip: c > 0, reward unit.
        num_tokens: tokens that count in the whole mini-batch, > 0.

    Returns:
        The loss, and sums: clip_fraction (tokens whose gradient the clip removes).

    Raises:
        ValueError: shapes differ, or value_clip or num_tokens is not positive.

    Source: the value clipping of Schulman et al.'s PPO code, studied in Engstrom et al. 2020,
        section 3, https://arxiv.org/abs/2005.12729
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    _check_positive(num_tokens)
    if value_clip <= 0:
        raise ValueError(f"value_loss needs value_clip > 0; got {value_clip=}")
    off = ~mask
    values, old_values = values.masked_fill(off, 0.0), old_values.masked_fill(off, 0.0)
    returns = returns.masked_fill(off, 0.0)
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    sums = {"clip_fraction": (clipped_error > plain_error).sum()}
    return 0.5 * torch.maximum(plain_error, clipped_error).sum() / num_tokens, sums


def _check_positive(num_tokens: float) -> None:
    if num_tokens <= 0:
        raise ValueError(f"num_tokens must be positive; got {num_tokens}")
