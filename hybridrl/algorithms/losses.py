"""Value loss, loss of reference answers, terms added to any policy loss: entropy bonus, KL penalty.

The value loss is a sum over the tokens of a micro-batch, divided by the token count of the whole
mini-batch on all ranks, as in token_loss.py. The other terms are token by token.

Shapes:  token fields have one shape, usually flat [N]; N may be 0
Masks:   true on tokens the policy sampled; values off the mask, even NaN, have no effect
Metrics: detached sums over tokens, to be summed over ranks and divided by the token count
Errors:  a ValueError if shapes differ, the mask is not bool or a setting is out of range
"""

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO, check_coef, estimate_kl
from hybridrl.algorithms.masked import at_least_float32, check_masked, masked_sum
from hybridrl.algorithms.token_loss import Sums, TokenLoss
from hybridrl.config.choices import KLEstimator


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    value_clip: float,
    num_tokens: float,
) -> tuple[Tensor, Sums]:
    """Compute PPO's clipped value loss.

    L = 1/num_tokens * sum_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2)

    Args:
        values: V_t under the current weights, with graph, in the reward's unit.
        old_values: V_t before this step's updates.
        returns: R_t, the targets.
        response_mask: tokens that the policy sampled.
        value_clip: c, in the reward's unit, > 0; infinity disables clipping.
        num_tokens: response tokens of the mini-batch on all ranks.

    Returns:
        Scalar loss with its graph, float32 (float64 for float64 input), in the squared reward's
        unit; and sums over tokens: value_clip_fraction (tokens with gradient 0 due to clipping),
        value_error ((V_t - R_t)^2).

    Source: Engstrom et al. 2020, section 3, https://arxiv.org/abs/2005.12729, on the reference
        implementation of https://arxiv.org/abs/1707.06347
    """
    tensors = {"values": values, "old_values": old_values, "returns": returns}
    check_masked("value_loss", response_mask, **tensors)
    if not (value_clip > 0 and num_tokens > 0):
        raise ValueError(f"value_loss needs settings > 0; got {value_clip=}, {num_tokens=}")
    values, old_values, returns = (
        at_least_float32(tensor).masked_fill(~response_mask, 0.0) for tensor in tensors.values()
    )
    unclipped = (values - returns).square()
    inside = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clipped = (inside - returns).square()
    loss = masked_sum(torch.maximum(unclipped, clipped) / 2, response_mask) / num_tokens
    return loss, {
        "value_clip_fraction": masked_sum((clipped > unclipped).detach(), response_mask),
        "value_error": masked_sum(unclipped.detach(), response_mask),
    }


def nll(log_probs: Tensor, response_mask: Tensor) -> TokenLoss:
    """Compute the negative log-likelihood of reference answers: l_t = -log_probs_t, nats.

    log_probs, [N] with graph, are of the reference's tokens given the prompt and the tokens before.
    """
    check_masked("nll", response_mask, log_probs=log_probs)
    return TokenLoss(-at_least_float32(log_probs).masked_fill(~response_mask, 0.0), {})


def entropy_bonus(entropy: Tensor, response_mask: Tensor, *, coef: float) -> TokenLoss:
    """Compute the entropy bonus as a loss term: l_t = -coef * H_t.

    H_t is the entropy of the policy's distribution at each token, [N] with graph, nats. The metric
    `entropy` is without the weight `coef`, which is >= 0.

    Source: Schulman et al. 2017, equation 9, https://arxiv.org/abs/1707.06347
    """
    check_coef("entropy_bonus", coef)
    sums = {"entropy": masked_sum(entropy.detach(), response_mask)}
    return TokenLoss(-coef * at_least_float32(entropy).masked_fill(~response_mask, 0.0), sums)


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    estimator: KLEstimator,
) -> TokenLoss:
    """Compute the KL penalty against the reference as a loss term: l_t = coef * KL_t.

    An unbiased estimate need not have an unbiased gradient. For the policy p, the reference q,
    d = log p - log q and tokens sampled from p, the expected gradients are

    - k1: E_p[grad log p] = 0, only noise.
    - k2: E_p[d grad log p] = grad KL(p || q), unbiased.
    - k3: E_p[(1 - q/p) grad log p] = grad KL(q || p), the reverse direction; a good approximation
      while p is close to q.

    Each is the gradient at one token given its prefix. A token's effect on the KL of later tokens
    counts only with the penalty in the reward. From the second update of a step on, tokens are not
    sampled from p exactly; this is not corrected.

    Args:
        log_probs: [N] the current weights', with graph, nats.
        ref_log_probs: [N] the frozen reference's, nats.
        response_mask: [N].
        coef: weight of the penalty, >= 0; the metric `kl_loss`, nats, is without it.
        estimator: k2 or a straight-through form for an unbiased gradient.

    Source: http://joschu.net/blog/kl-approx.html for the estimators; Tang and Munos 2025,
        https://arxiv.org/abs/2506.09477, for their gradients
    """
    check_masked("kl_penalty", response_mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_coef("kl_penalty", coef)
    # Masked before exp: the gradient of 0 * exp(NaN) would be NaN.
    log_probs, ref_log_probs = (
        tensor.masked_fill(~response_mask, 0.0) for tensor in (log_probs, ref_log_probs)
    )
    kl = estimate_kl(log_probs, ref_log_probs, estimator)
    return TokenLoss(coef * kl, {"kl_loss": masked_sum(kl.detach(), response_mask)})


def ratio_maxima(
    log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """Compute metrics to reduce over micro-batches and ranks by max; detached scalars.

    ratio_max: the largest policy ratio, and at least 1, the exponent clamped as in the losses.
    log_ratio_max: the largest |log_probs - old_log_probs|, nats; exactly 0 before a step's first
    update, and without response tokens.
    """
    difference = at_least_float32(log_probs.detach()) - at_least_float32(old_log_probs.detach())
    difference = difference.masked_fill(~response_mask, 0.0).flatten()
    difference = torch.cat([difference, difference.new_zeros(1)])
    return {
        "ratio_max": difference.max().clamp(max=MAX_LOG_RATIO).exp(),
        "log_ratio_max": difference.abs().max(),
    }
