"""KL divergence of the policy from a reference: estimators per token, penalty and coefficient.

x is a sampled token, p the policy that sampled it, q the reference:
    d = log p(x) - log q(x),   KL(p || q) = E_p[d]
A good estimate of the divergence need not have its gradient (see algorithms/losses.py). The
straight-through forms take the value of one estimator and the gradient of k2, which is the right
one on average.
Units:   log-probs and divergences in nats

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html, for the values; Tang and Munos 2025,
    https://arxiv.org/abs/2506.09477, for the gradients
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_same_shape
from hybridrl.config.algorithm_schema import MAX_RELATIVE_ERROR
from hybridrl.config.choices import KLEstimator

# exp(20) = 5e8: beyond any policy worth training, and far from float32's overflow at exp(88).
MAX_LOG_RATIO = 20.0


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d: unbiased under p, of either sign, high variance.

    Args:
        log_probs: log p of the sampled tokens, any shape.
        ref_log_probs: log q of the same tokens, the same shape.

    Returns:
        The same shape, float32 (float64 for float64 input), nats. NaN in is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html
    """
    return _difference("k1", log_probs, ref_log_probs)


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2: never negative, biased, low variance; its gradient is that of KL(p || q).

    Args:
        log_probs: log p of the sampled tokens, any shape.
        ref_log_probs: log q of the same tokens, the same shape.

    Returns:
        The same shape, float32 (float64 for float64 input), nats. NaN in is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html
    """
    return _difference("k2", log_probs, ref_log_probs).square() / 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased under p, never negative, low variance.

    d below -MAX_LOG_RATIO counts as that bound, with gradient 0: a token which the reference finds
    far likelier than the policy gives a large number, not infinity.

    Args:
        log_probs: log p of the sampled tokens, any shape.
        ref_log_probs: log q of the same tokens, the same shape.

    Returns:
        The same shape, float32 (float64 for float64 input), nats. NaN in is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html
    """
    difference = _difference("k3", log_probs, ref_log_probs).clamp(min=-MAX_LOG_RATIO)
    # Rounding leaves up to -1e-15 where d is tiny.
    return (torch.expm1(-difference) + difference).clamp(min=0.0)


def k1_straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k1 with the gradient of k2: d, whose gradient is d times that of d.

    verl's k1+.

    Args:
        log_probs: log p of the sampled tokens, any shape.
        ref_log_probs: log q of the same tokens, the same shape.

    Returns:
        The same shape, float32 (float64 for float64 input), nats; bit for bit k1's values. NaN in
        is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html; https://arxiv.org/abs/2506.09477
    """
    return _with_gradient_of_k2(k1(log_probs, ref_log_probs), log_probs, ref_log_probs)


def k3_straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k3 with the gradient of k2: exp(-d) - 1 + d, whose gradient is d times that of d.

    The gradient grows with d without bound, also where k3's own is cut off (MAX_LOG_RATIO). verl's
    k3+ (low_var_kl+), which also bounds the value by 10.

    Args:
        log_probs: log p of the sampled tokens, any shape.
        ref_log_probs: log q of the same tokens, the same shape.

    Returns:
        The same shape, float32 (float64 for float64 input), nats; bit for bit k3's values. NaN in
        is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html; https://arxiv.org/abs/2506.09477
    """
    return _with_gradient_of_k2(k3(log_probs, ref_log_probs), log_probs, ref_log_probs)


ESTIMATORS: Mapping[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        KLEstimator.k1: k1,
        KLEstimator.k2: k2,
        KLEstimator.k3: k3,
        KLEstimator.k1_straight_through: k1_straight_through,
        KLEstimator.k3_straight_through: k3_straight_through,
    }
)


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) per token by the named estimator.

    Args:
        log_probs: the policy's, of the sampled tokens, any shape.
        ref_log_probs: the reference's, of the same tokens, the same shape.
        estimator: any of ESTIMATORS.

    Returns:
        The same shape, float32 (float64 for float64 input), nats. NaN in is NaN out.

    Raises:
        ValueError: the shapes differ.

    Source: http://joschu.net/blog/kl-approx.html
    """
    return ESTIMATORS[estimator](log_probs, ref_log_probs)


def kl_penalty_rewards(
    scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    coef: float,
    estimator: KLEstimator,
) -> Tensor:
    """Per-token rewards: r_t = score_t - coef * KL_t.

    The KL is that of the policy which sampled the tokens. k1, summed over a response, is an
    unbiased estimate of the response's KL; k3 is too, with less variance; k2 is biased.

    Args:
        scores: reward before KL, on its tokens (an outcome on the last), any shape.
        old_log_probs: the policy's before this step's updates, the same shape.
        ref_log_probs: the reference's, the same shape.
        coef: weight of the penalty, >= 0, in the reward's unit per nat.
        estimator: k1, k2 or k3; a straight-through form is the same here, where no gradient is.

    Returns:
        The same shape, float32 (float64 for float64 input), in the reward's unit. NaN in is NaN
        out.

    Raises:
        ValueError: the shapes differ, or coef is negative or not finite.

    Source: Ouyang et al. 2022, section 3.5, https://arxiv.org/abs/2203.02155
    """
    check_same_shape("kl_penalty_rewards", scores=scores, old_log_probs=old_log_probs)
    check_coef("kl_penalty_rewards", coef)
    penalty = coef * estimate_kl(old_log_probs, ref_log_probs, estimator)
    return at_least_float32(scores) - penalty


def adapt_coef(
    coef: float, *, current: float, target: float, horizon: int, num_responses: int
) -> float:
    """The KL coefficient after a step: larger if the KL was above its target, smaller if below.

    e = clip(current / target - 1, -0.2, 0.2),   coef' = coef * (1 + e * num_responses / horizon)

    The paper's K_beta is num_responses / horizon here, as in the authors' code, so that the pace
    does not depend on the size of a step.

    Args:
        coef: the coefficient used in the step, >= 0; 0 stays 0.
        current: mean KL per response of the step, nats.
        target: wanted KL per response, nats, > 0.
        horizon: responses over which a constant error of one (before clipping) would double coef.
        num_responses: responses of the step, >= 1.

    Returns:
        The next coefficient, > 0 if coef is.

    Raises:
        ValueError: an argument is out of range or not finite, or num_responses >= 5 * horizon,
            where a step could turn the coefficient negative.

    Source: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    """
    check_coef("adapt_coef", coef)
    if not math.isfinite(current) or not (math.isfinite(target) and target > 0):
        raise ValueError(
            f"adapt_coef needs finite current and target > 0; got {current=}, {target=}"
        )
    if num_responses < 1 or num_responses * MAX_RELATIVE_ERROR >= horizon:
        raise ValueError(
            f"adapt_coef needs 1 <= num_responses < horizon / {MAX_RELATIVE_ERROR}; "
            f"got {num_responses=}, {horizon=}"
        )
    error = min(max(current / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * num_responses / horizon)


def check_coef(function: str, coef: float) -> None:
    """Raise a ValueError unless a penalty's weight is finite and not negative."""
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"{function} needs a finite coef >= 0; got {coef=}")


def _with_gradient_of_k2(values: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`values`, and k2's gradient: zeros are added, which only backward can tell from nothing."""
    right = k2(log_probs, ref_log_probs)
    return values.detach() + (right - right.detach())


def _difference(function: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    check_same_shape(function, log_probs=log_probs, ref_log_probs=ref_log_probs)
    return at_least_float32(log_probs) - at_least_float32(ref_log_probs)
