"""KL divergence of the policy from a reference: estimators per token, penalty, coefficient.

For a token x sampled from the policy p, with reference q:

    d = log p(x) - log q(x),   KL(p || q) = E_p[d]

All functions raise a ValueError if shapes differ or an argument is out of range or not finite.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html, for the values; Tang and Munos 2025,
    https://arxiv.org/abs/2506.09477, for the gradients
"""

import math

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_same_shape
from hybridrl.config.choices import KLEstimator
from hybridrl.config.sections.algorithm import MAX_RELATIVE_KL_ERROR

# exp(20) = 5e8: larger than any useful ratio, far below float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token.

    k1  d                 unbiased, of either sign, high variance
    k2  d^2 / 2           never negative, biased, low variance; unbiased gradient
    k3  exp(-d) - 1 + d   unbiased, never negative, low variance

    An unbiased estimate of the divergence need not have an unbiased gradient (losses.kl_penalty).
    The straight-through forms have the value of k1 or k3, bit for bit, and the gradient of k2,
    d * grad d: verl's k1+ and k3+ (low_var_kl+). verl also clamps the value of k3+ to 10.

    In k3, d is clamped below at -MAX_LOG_RATIO, with gradient 0 there: a token far likelier under
    the reference gives a large number instead of infinity. The straight-through gradient grows with
    d without bound.

    Args:
        log_probs: log p of the sampled tokens, any shape, nats.
        ref_log_probs: log q of the same tokens, the same shape, nats.
        estimator: one of these.

    Returns:
        The same shape, float32 (float64 for float64 input), nats; NaN in, NaN out.
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

    Returns:
        The same shape, float32 (float64 for float64 input), in the reward's unit; NaN in, NaN out.

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
        num_responses: responses of the step, >= 1.

    Returns:
        The next coefficient, > 0 if coef is: num_responses must be below 5 * horizon.

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


def check_coef(function: str, coef: float) -> None:
    """Raise a ValueError unless a penalty's weight is finite and not negative."""
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"{function} needs a finite coef >= 0; got {coef=}")
