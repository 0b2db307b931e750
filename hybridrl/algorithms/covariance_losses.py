"""Policy losses that restrict the tokens with the largest effect on entropy: Clip-Cov, KL-Cov.

To first order, a policy gradient step lowers the entropy by the covariance of log-probability and
advantage. A few tokens account for most of it. They are selected once per step, over all its
tokens, from the log-probs before the step's updates. The selection then does not depend on the
partition over ranks and micro-batches. (The paper's code selects within each micro-batch from the
current log-probs, which are the same before the first update of a step.)

Tensors and errors are those of token_loss.py. A selection takes covariances and a mask, [N] each.
It selects max(1, floor(fraction * tokens)) tokens of the mask, [N] bool, as the authors' code does.
The minimum of 1 keeps small batches from selecting none.

Source: Cui et al. 2025, section 4, https://arxiv.org/abs/2505.22617
"""

import math

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    at_least_float32,
    check_coef,
    check_finite,
    check_masked,
    masked_mean,
)
from hybridrl.algorithms.policy_losses import ppo_clip
from hybridrl.algorithms.token_loss import TokenLoss, policy_inputs, policy_sums


def covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Compute each token's term of the covariance of log-probability and advantage.

    Cov_t = (log_probs_t - mean log_probs) (A_t - mean A),   means over all tokens of the mask

    Returns [N] float32 (float64 for float64 input), 0 off the mask. The mask is true somewhere,
    with finite numbers.

    Source: Cui et al. 2025, equation 10, https://arxiv.org/abs/2505.22617
    """
    tensors = {"log_probs": log_probs, "advantages": advantages}
    check_masked("covariances", response_mask, **tensors)
    check_finite("covariances", response_mask, **tensors)
    product = _centred(log_probs, response_mask) * _centred(advantages, response_mask)
    return product.masked_fill(~response_mask, 0.0)


def some_in_band(
    covariance: Tensor,
    response_mask: Tensor,
    generator: torch.Generator,
    *,
    fraction: float,
    cov_low: float,
    cov_high: float,
) -> Tensor:
    """Draw tokens whose covariance is in a band, for `clip_cov`.

    If there are fewer, all of them. In the paper the fraction is 2e-4, the band 1 to 5.

    Source: Cui et al. 2025, equation 11, https://arxiv.org/abs/2505.22617
    """
    count = _count("some_in_band", covariance, response_mask, fraction)
    if not cov_low < cov_high:
        raise ValueError(f"some_in_band needs cov_low < cov_high; got {cov_low=}, {cov_high=}")
    inside = response_mask & (covariance >= cov_low) & (covariance <= cov_high)
    inside = inside.nonzero().flatten()
    drawn = inside[torch.randperm(len(inside), generator=generator)[:count]]
    return torch.zeros_like(response_mask).index_fill(0, drawn, True)


def largest(
    covariance: Tensor, response_mask: Tensor, generator: torch.Generator, *, fraction: float
) -> Tensor:
    """Select the tokens with the largest covariances, for `kl_cov`.

    The generator is not read. In the paper the fraction is 2e-3 for 7B and 2e-4 for 32B.

    Source: Cui et al. 2025, equation 13, https://arxiv.org/abs/2505.22617
    """
    count = _count("largest", covariance, response_mask, fraction)
    ranked = covariance.masked_fill(~response_mask, -math.inf).topk(count).indices
    return torch.zeros_like(response_mask).index_fill(0, ranked, True)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute Clip-Cov: PPO's clipped surrogate without gradient on the selected tokens.

    `selected` is [N] bool, as from `some_in_band`. The paper sets clip_low and clip_high to 1.

    Source: Cui et al. 2025, equation 12, https://arxiv.org/abs/2505.22617
    """
    values, sums = ppo_clip(
        log_probs, old_log_probs, advantages, response_mask, clip_low=clip_low, clip_high=clip_high
    )
    sums = sums | {"selected_fraction": (selected & response_mask).sum().to(values.dtype)}
    return TokenLoss(torch.where(selected, values.detach(), values), sums)


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    selected: Tensor,
    *,
    coef: float,
) -> TokenLoss:
    """Compute KL-Cov: the policy gradient with a KL penalty on the selected tokens.

    l_t = -r_t A_t + [t selected] coef * |log r_t|

    |log r_t| stands for the paper's KL divergence in its authors' code, for which their coef was
    chosen. `selected` is [N] bool, as from `largest`; coef, beta in the paper, is >= 0, 1 in the
    paper. The metric clip_fraction counts the selected tokens.

    Source: Cui et al. 2025, equation 14, https://arxiv.org/abs/2505.22617
    """
    check_coef("kl_cov", coef)
    log_ratio, advantages = policy_inputs(
        "kl_cov", log_probs, old_log_probs, advantages, response_mask
    )
    penalty = coef * log_ratio.abs()
    sums = policy_sums(log_ratio, selected & response_mask, response_mask)
    sums["selected_fraction"] = sums["clip_fraction"]
    values = -log_ratio.exp() * advantages + penalty.masked_fill(~selected, 0.0)
    return TokenLoss(values, sums)


def _centred(values: Tensor, mask: Tensor) -> Tensor:
    return at_least_float32(values) - masked_mean(values, mask)


def _count(function: str, covariance: Tensor, response_mask: Tensor, fraction: float) -> int:
    """Return floor(fraction * tokens), but at least 1 if the mask is not empty."""
    check_masked(function, response_mask, covariance=covariance)
    if not 0 < fraction <= 1:
        raise ValueError(f"{function} needs 0 < fraction <= 1; got {fraction=}")
    tokens = int(response_mask.sum())
    return min(tokens, max(1, math.floor(fraction * tokens)))
