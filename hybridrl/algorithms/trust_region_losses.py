"""Policy losses with a trust region other than a clipped ratio: SAPO, divergence PPO.

Each is computed token by token and returns a `TokenLoss`; aggregation.py computes the scalar.
Tensors and errors are those of token_loss.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.token_loss import TokenLoss, advantages_of, log_ratio_of, policy_sums

# Lower bound of 1 - p.
MIN_REST = 1.0e-8


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> TokenLoss:
    """Compute SAPO: a soft gate reduces the gradient as the ratio moves away from 1.

    l_t = -4/tau * sigmoid(tau (r_t - 1)) A_t,   r_t = exp(log_probs_t - old_log_probs_t)
    tau = tau_positive if A_t > 0, else tau_negative

    At r_t = 1 the gradient is that of r_t A_t; it falls to 0 on both sides, faster for a larger
    tau.

    In the paper tau_positive is 1, tau_negative 1.05; both are > 0. The metric clip_fraction counts
    tokens whose gradient is less than half.

    Source: Gao et al. 2025, equations 5 and 6, https://arxiv.org/abs/2511.20347
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"sapo needs both taus > 0; got {tau_positive=}, {tau_negative=}")
    log_ratio = log_ratio_of("sapo", log_probs, old_log_probs, response_mask)
    advantages = advantages_of("sapo", advantages, response_mask)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    gradient = 4 * gate.detach() * (1 - gate.detach())
    sums = policy_sums(log_ratio, gradient < 0.5, response_mask)
    return TokenLoss(-4 / tau * gate * advantages, sums)


def dppo_tv(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_divergence: float,
    max_ratio: float,
) -> TokenLoss:
    """Compute divergence PPO with the binary total variation of each token.

    l_t = -M_t min(r_t, max_ratio) A_t,   r_t = p / q,   D_t = |p - q|
    M_t = 0 if D_t > max_divergence and the update would increase it, else 1

    p and q are the probabilities of the token under the current weights and the sampler. The update
    increases D_t if r_t > 1 and A_t > 0, or r_t < 1 and A_t < 0.

    Args:
        max_divergence: delta, in (0, 1).
        max_ratio: bound of the importance weight, >= 1; 20 in the authors' code.

    Source: Qi et al. 2026, equations 11 to 13, https://arxiv.org/abs/2602.04879
    """
    if not max_divergence < 1:
        raise ValueError(f"dppo_tv needs max_divergence < 1; got {max_divergence=}")
    tensors = (log_probs, rollout_log_probs, advantages, response_mask)
    return _dppo("dppo_tv", lambda p, q, _: (p - q).abs(), *tensors, max_divergence, max_ratio)


def dppo_kl(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    max_divergence: float,
    max_ratio: float,
) -> TokenLoss:
    """Compute divergence PPO with the binary KL divergence of each token.

    The loss is that of `dppo_tv` with D_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), nats.

    max_divergence is in nats, > 0.

    Source: Qi et al. 2026, equations 11, 12 and 14, https://arxiv.org/abs/2602.04879
    """
    tensors = (log_probs, rollout_log_probs, advantages, response_mask)
    return _dppo("dppo_kl", _binary_kl, *tensors, max_divergence, max_ratio)


def _binary_kl(p: Tensor, q: Tensor, log_ratio: Tensor) -> Tensor:
    rest = ((1 - q).clamp(min=MIN_REST) / (1 - p).clamp(min=MIN_REST)).log()
    return -q * log_ratio + (1 - q) * rest


def _dppo(
    function: str,
    divergence: Callable[[Tensor, Tensor, Tensor], Tensor],
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    max_divergence: float,
    max_ratio: float,
) -> TokenLoss:
    """Compute l_t = -M_t min(r_t, max_ratio) A_t with gradient -M_t min(...) A_t grad log p_t.

    The bound max_ratio also applies to the weight in the gradient. `divergence` computes D_t from
    [N] p, q and log r, without graph.
    """
    if not (max_divergence > 0 and max_ratio >= 1):
        raise ValueError(
            f"{function} needs max_divergence > 0 and max_ratio >= 1; got {max_divergence=}, "
            f"{max_ratio=}"
        )
    log_ratio = log_ratio_of(function, log_probs, rollout_log_probs, response_mask)
    advantages = advantages_of(function, advantages, response_mask)
    off_mask = ~response_mask
    p, q = (x.detach().masked_fill(off_mask, 0.0).exp() for x in (log_probs, rollout_log_probs))
    ratio = log_ratio.detach().exp()
    away = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
    blocked = (divergence(p, q, log_ratio.detach()) > max_divergence) & away
    weight = ratio.clamp(max=max_ratio).masked_fill(blocked, 0.0)
    # Value 1, gradient of log p.
    anchored = (log_ratio - log_ratio.detach()).exp()
    sums = policy_sums(log_ratio, blocked, response_mask)
    return TokenLoss(-weight * anchored * advantages, sums)
