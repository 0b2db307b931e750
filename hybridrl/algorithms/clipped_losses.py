"""Policy losses that clip the policy ratio: PPO, dual-clip PPO, CISPO, GSPO.

Each is computed token by token and returns a `TokenLoss`; aggregation.py computes the scalar.
Tensors and errors are those of token_loss.py.

Ratio:   r_t = exp(log_probs_t - old_log_probs_t), the exponent clamped to +-MAX_LOG_RATIO
Clip:    0 < clip_low <= 1; 1 is no lower bound; clip_high > 0
"""

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import sequence_sums
from hybridrl.algorithms.token_loss import TokenLoss, advantages_of, log_ratio_of, policy_sums


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute PPO's clipped surrogate; with clip_high > clip_low it is DAPO's clip-higher.

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Source: Schulman et al. 2017, equation 7, https://arxiv.org/abs/1707.06347; Yu et al. 2025,
        equation 10, https://arxiv.org/abs/2503.14476
    """
    _check_clip("ppo_clip", clip_low, clip_high)
    log_ratio = log_ratio_of("ppo_clip", log_probs, old_log_probs, response_mask)
    advantages = advantages_of("ppo_clip", advantages, response_mask)
    unclipped, clipped = _surrogates(log_ratio.exp(), advantages, clip_low, clip_high)
    sums = policy_sums(log_ratio, (clipped < unclipped).detach(), response_mask)
    return TokenLoss(-torch.minimum(unclipped, clipped), sums)


def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float,
) -> TokenLoss:
    """Compute dual-clip PPO: the ratio is bounded for negative advantages, too.

    s_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    l_t = -s_t                       if A_t >= 0
    l_t = -max(s_t, max_ratio A_t)   if A_t < 0

    max_ratio, c in the paper, is above 1 + clip_high; 3 in the paper.

    Source: Ye et al. 2020, equation 5, https://arxiv.org/abs/1912.09729
    """
    if not max_ratio > 1 + clip_high:
        raise ValueError(
            f"dual_clip needs max_ratio > 1 + clip_high; got {max_ratio=}, {clip_high=}"
        )
    _check_clip("dual_clip", clip_low, clip_high)
    log_ratio = log_ratio_of("dual_clip", log_probs, old_log_probs, response_mask)
    advantages = advantages_of("dual_clip", advantages, response_mask)
    unclipped, clipped = _surrogates(log_ratio.exp(), advantages, clip_low, clip_high)
    surrogate = torch.minimum(unclipped, clipped)
    bounded = torch.maximum(surrogate, max_ratio * advantages)
    surrogate = torch.where(advantages < 0, bounded, surrogate)
    sums = policy_sums(log_ratio, (surrogate != unclipped).detach(), response_mask)
    return TokenLoss(-surrogate, sums)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute CISPO: REINFORCE with a clipped importance weight; every token has a gradient.

    l_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log_probs_t,   sg = stop gradient

    Only the gradient is meaningful: the value need not fall while training improves. The paper has
    no lower bound.

    Source: MiniMax 2025 (MiniMax-M1), equations 4 and 5, https://arxiv.org/abs/2506.13585
    """
    _check_clip("cispo", clip_low, clip_high)
    log_ratio = log_ratio_of("cispo", log_probs, old_log_probs, response_mask)
    advantages = advantages_of("cispo", advantages, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    # Masked before the product: the gradient of 0 * NaN would be NaN.
    log_probs = log_probs.masked_fill(~response_mask, 0.0)
    sums = policy_sums(log_ratio, weight != ratio, response_mask)
    return TokenLoss(-weight * advantages * log_probs, sums)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute GSPO: the clipped surrogate with one ratio per response.

    s_i = exp(1/|o_i| * sum_t log r_{i,t}),   s_{i,t} = sg(s_i) * pi_t / sg(pi_t)
    l_t = -min(s_{i,t} A_t, clip(s_{i,t}, 1 - clip_low, 1 + clip_high) A_t)

    The ratio is the geometric mean of the token ratios; sg stops the gradient. This is the paper's
    token form. It equals the sequence form in value and gradient if the tokens of a response share
    one advantage and losses are aggregated by sequence_mean. The paper clips by 3e-4 and 4e-4. The
    metrics `ratio` and `approx_kl` are computed from the token ratios.

    Source: Zheng et al. 2025, equations 5, 7, 13 and 14, https://arxiv.org/abs/2507.18071
    """
    _check_clip("gspo", clip_low, clip_high)
    log_ratio = log_ratio_of("gspo", log_probs, old_log_probs, response_mask)
    advantages = advantages_of("gspo", advantages, response_mask)
    lengths = sequence_sums(response_mask.to(log_ratio.dtype), sequence_id).clamp(min=1)
    mean = (sequence_sums(log_ratio.detach(), sequence_id) / lengths)[sequence_id]
    ratio = (mean + log_ratio - log_ratio.detach()).exp()
    unclipped, clipped = _surrogates(ratio, advantages, clip_low, clip_high)
    sums = policy_sums(log_ratio, (clipped < unclipped).detach(), response_mask)
    return TokenLoss(-torch.minimum(unclipped, clipped), sums)


def _surrogates(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return [N] r_t A_t and [N] clip(r_t, 1 - clip_low, 1 + clip_high) A_t."""
    return ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages


def _check_clip(function: str, clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"{function} needs 0 < clip_low <= 1 and clip_high > 0; got {clip_low=}, {clip_high=}"
        )
