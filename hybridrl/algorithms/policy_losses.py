"""Policy losses: PPO, dual-clip PPO, CISPO, GSPO, SAPO, divergence PPO.

Each is computed token by token and returns a `TokenLoss`. Tensors, errors and the aggregation to a
scalar are in token_loss.py; covariance_losses.py has two more losses.

Ratio:   r_t = exp(log_probs_t - old_log_probs_t), the exponent clamped to +-MAX_LOG_RATIO
Clip:    0 < clip_low <= 1; 1 is no lower bound; clip_high > 0
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.token_loss import TokenLoss, policy_inputs, policy_sums, sequence_sums

# Lower bound of 1 - p.
MIN_REST = 1.0e-8


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
    tensors = (log_probs, old_log_probs, advantages, response_mask)
    return _clipped("ppo_clip", tensors, clip_low, clip_high)


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
    tensors = (log_probs, old_log_probs, advantages, response_mask)
    return _clipped("dual_clip", tensors, clip_low, clip_high, max_ratio=max_ratio)


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
    log_ratio, advantages = policy_inputs(
        "cispo", log_probs, old_log_probs, advantages, response_mask
    )
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
    tensors = (log_probs, old_log_probs, advantages, response_mask)
    return _clipped("gspo", tensors, clip_low, clip_high, sequence_id=sequence_id)


def _clipped(
    function: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    clip_low: float,
    clip_high: float,
    *,
    max_ratio: float | None = None,
    sequence_id: Tensor | None = None,
) -> TokenLoss:
    """Compute the clipped surrogate, dual-clipped with `max_ratio`.

    With `sequence_id` ratios are those of responses, with the gradient of each token's.
    """
    _check_clip(function, clip_low, clip_high)
    (log_ratio, advantages), mask = policy_inputs(function, *tensors), tensors[-1]
    exponent = log_ratio
    if sequence_id is not None:
        lengths = sequence_sums(mask.to(log_ratio.dtype), sequence_id).clamp(min=1)
        mean = (sequence_sums(log_ratio.detach(), sequence_id) / lengths)[sequence_id]
        exponent = mean + log_ratio - log_ratio.detach()
    ratio = exponent.exp()
    unclipped = ratio * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if max_ratio is not None:
        bounded = torch.maximum(surrogate, max_ratio * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    return TokenLoss(-surrogate, policy_sums(log_ratio, (surrogate != unclipped).detach(), mask))


def _check_clip(function: str, clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"{function} needs 0 < clip_low <= 1 and clip_high > 0; got {clip_low=}, {clip_high=}"
        )


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
    tau. In the paper tau_positive is 1, tau_negative 1.05; both are > 0. The metric clip_fraction
    counts tokens whose gradient is less than half.

    Source: Gao et al. 2025, equations 5 and 6, https://arxiv.org/abs/2511.20347
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(f"sapo needs both taus > 0; got {tau_positive=}, {tau_negative=}")
    log_ratio, advantages = policy_inputs(
        "sapo", log_probs, old_log_probs, advantages, response_mask
    )
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
    increases D_t if r_t > 1 and A_t > 0, or r_t < 1 and A_t < 0. max_divergence, delta in the
    paper, is in (0, 1); max_ratio >= 1 bounds the importance weight, 20 in the authors' code.

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
    max_divergence is > 0.

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
    log_ratio, advantages = policy_inputs(
        function, log_probs, rollout_log_probs, advantages, response_mask
    )
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
