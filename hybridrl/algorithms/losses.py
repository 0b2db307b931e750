"""Value loss, loss of reference answers, terms added to any policy loss: entropy bonus, KL penalty.

The value loss is a sum over a micro-batch's tokens, divided by the mini-batch's token count over
all ranks. The other terms are token by token.

Shapes:  token fields have one shape, usually flat [N]; N may be 0
Masks:   true on tokens the policy sampled; values off the mask, even NaN, have no effect
Units:   log-probs and KL in nats
Metrics: detached sums over tokens, to be summed over ranks and divided by the token count
Returns: float32, or float64 for float64 input
Errors:  a ValueError if shapes differ, the mask is not bool or a setting is out of range

KL:      for a token x sampled from the policy p, with reference q,
         d = log p(x) - log q(x),   KL(p || q) = E_p[d]

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html, for the values of KL estimators; Tang
    and Munos 2025, https://arxiv.org/abs/2506.09477, for their gradients
"""

import math

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    MAX_LOG_RATIO,
    at_least_float32,
    check_coef,
    check_masked,
    check_same_shape,
    masked_sum,
)
from hybridrl.algorithms.token_loss import Sums, TokenLoss
from hybridrl.config.choices import KLEstimator
from hybridrl.config.sections import MAX_RELATIVE_KL_ERROR


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
        Scalar loss with its graph, in the squared reward's unit; and sums over tokens:
        value_clip_fraction (tokens with gradient 0 due to clipping), value_error ((V_t - R_t)^2).

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
    """Compute the negative log-likelihood of reference answers: l_t = -log_probs_t.

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


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token; tensors of one shape, any; NaN in, NaN out.

    k1  d                 unbiased, of either sign, high variance
    k2  d^2 / 2           never negative, biased, low variance
    k3  exp(-d) - 1 + d   unbiased, never negative, low variance

    The straight-through forms have the value of k1 or k3, bit for bit, and the gradient of k2,
    d * grad d. They are verl's k1+ and k3+ (low_var_kl+), of which it clamps k3+ to 10.

    In k3, d is clamped below at -MAX_LOG_RATIO, with gradient 0 there. A token far likelier under
    the reference then gives a large number instead of infinity.
    """
    check_same_shape(estimator, log_probs=log_probs, ref_log_probs=ref_log_probs)
    difference = at_least_float32(log_probs) - at_least_float32(ref_log_probs)
    k2 = difference.square() / 2
    if estimator is KLEstimator.k2:
        return k2
    values = difference
    if estimator in (KLEstimator.k3, KLEstimator.k3_straight_through):
        clamped = difference.clamp(min=-MAX_LOG_RATIO)
        # Rounding gives values down to -1e-15 for tiny d.
        values = (torch.expm1(-clamped) + clamped).clamp(min=0.0)
    if estimator in (KLEstimator.k1, KLEstimator.k3):
        return values
    return values.detach() + (k2 - k2.detach())


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    estimator: KLEstimator,
) -> TokenLoss:
    """Compute the KL penalty against the reference as a loss term: l_t = coef * KL_t.

    An unbiased estimate need not have an unbiased gradient. For tokens sampled from p, the expected
    gradients are

    - k1: E_p[grad log p] = 0, only noise.
    - k2: E_p[d grad log p] = grad KL(p || q), unbiased.
    - k3: E_p[(1 - q/p) grad log p] = grad KL(q || p), the reverse direction; a good approximation
      while p is close to q.

    Each is the gradient at one token given its prefix. A token's effect on the KL of later tokens
    counts only with the penalty in the reward. From the second update of a step on, tokens are not
    sampled from p exactly; this is not corrected.

    log_probs are the current weights', with graph. coef is >= 0; the metric `kl_loss` is without.
    """
    check_masked("kl_penalty", response_mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_coef("kl_penalty", coef)
    # Masked before exp: the gradient of 0 * exp(NaN) would be NaN.
    log_probs, ref_log_probs = (
        tensor.masked_fill(~response_mask, 0.0) for tensor in (log_probs, ref_log_probs)
    )
    kl = estimate_kl(log_probs, ref_log_probs, estimator)
    return TokenLoss(coef * kl, {"kl_loss": masked_sum(kl.detach(), response_mask)})


def kl_penalty_rewards(
    scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    coef: float,
    estimator: KLEstimator,
) -> Tensor:
    """Compute per-token rewards with the KL penalty: r_t = score_t - coef * KL_t.

    The KL is that of the policy that sampled the tokens. Summed over a response, k1 and k3 are
    unbiased estimates of the response's KL, k3 with less variance; k2 is biased.

    Args:
        scores: reward before KL, on its tokens (an outcome on the last), any shape.
        old_log_probs: the policy's before this step's updates, the same shape.
        ref_log_probs: the reference's, the same shape.
        coef: weight of the penalty, >= 0, in the reward's unit per nat.
        estimator: k1, k2 or k3; a straight-through form has the same value.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """
    check_same_shape("kl_penalty_rewards", scores=scores, old_log_probs=old_log_probs)
    check_coef("kl_penalty_rewards", coef)
    penalty = coef * estimate_kl(old_log_probs, ref_log_probs, estimator)
    return at_least_float32(scores) - penalty


def adapt_coef(
    coef: float, *, current: float, target: float, horizon: int, num_responses: int
) -> float:
    """Compute the KL coefficient of the next step: larger if the KL was above its target.

    e = clip(current / target - 1, -0.2, 0.2),   coef' = coef * (1 + e * num_responses / horizon)

    The paper's K_beta is num_responses / horizon, as in the authors' code: the rate of change per
    response does not depend on the batch size.

    Args:
        coef: the coefficient used in the step, >= 0; 0 stays 0.
        current: mean KL per response of the step, nats.
        target: KL per response to hold, nats, > 0.
        horizon: responses after which a constant e of 1, unclipped, would double the coefficient.
        num_responses: responses of the step, >= 1; below 5 * horizon, so that coef' stays > 0.

    Source: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    """
    check_coef("adapt_coef", coef)
    if not math.isfinite(current) or not (math.isfinite(target) and target > 0):
        raise ValueError(
            f"adapt_coef needs finite current and target > 0; got {current=}, {target=}"
        )
    if num_responses < 1 or num_responses * MAX_RELATIVE_KL_ERROR >= horizon:
        raise ValueError(
            f"adapt_coef needs 1 <= num_responses < horizon / {MAX_RELATIVE_KL_ERROR}; "
            f"got {num_responses=}, {horizon=}"
        )
    error = min(max(current / target - 1, -MAX_RELATIVE_KL_ERROR), MAX_RELATIVE_KL_ERROR)
    return coef * (1 + error * num_responses / horizon)


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
