"""Rollout correction: importance weights for the mismatch of sampler and trainer.

Sampler (mu, rollout_log_probs) and trainer (pi_old, old_log_probs) have the same weights but
different kernels, so their probabilities differ slightly. With top_p < 1 both are of the tokens
that sampling kept. rho_t = pi_old(y_t) / mu(y_t) corrects for the difference. It is independent of
PPO's ratio (current over old policy).

Shapes:  B = responses   T = response tokens, right-padded
Units:   log-probs in nats; ratios and weights without unit
Masks:   values off the mask are never read
Errors:  a ValueError if shapes differ, the mask is not bool, a setting is out of range, or a
         log-prob on the mask is not finite
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    MAX_LOG_RATIO,
    at_least_float32,
    check_finite,
    check_masked,
    on_mask,
)
from hybridrl.config.choices import CorrectionLevel, CorrectionMethod


def importance_ratios(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, level: CorrectionLevel
) -> Tensor:
    """Compute the importance ratios rho of tokens or responses.

    token          log rho_t = d_t,   d_t = old_log_probs_t - rollout_log_probs_t
    sequence       log rho_t = sum_t d_t of the response
    sequence_mean  log rho_t = 1/|o| sum_t d_t: the geometric mean of the response's ratios

    Log-ratios are clamped to +-MAX_LOG_RATIO. Tensors are [B, T]; the result is float32 (float64
    for float64 input), 1 off the mask.

    Source: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl (token); Liu, Li et al. 2025,
        https://richardli.xyz/rl-collapse (sequence and its geometric mean)
    """
    log_probs = {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs}
    check_masked("rollout correction", response_mask, **log_probs)
    check_finite("rollout correction", response_mask, **log_probs)  # NaN would pass every clamp
    difference = at_least_float32(old_log_probs) - at_least_float32(rollout_log_probs)
    difference = difference.masked_fill(~response_mask, 0.0)
    if level is not CorrectionLevel.token:
        total = difference.sum(1, keepdim=True)
        if level is CorrectionLevel.sequence_mean:
            total = total / response_mask.sum(1, keepdim=True).clamp(min=1)
        difference = total.expand_as(difference)
    ratios = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratios.masked_fill(~response_mask, 1.0)


def correction_weights(
    ratios: Tensor, response_mask: Tensor, method: CorrectionMethod, low: float, high: float
) -> Tensor:
    """Compute weights of the policy loss from importance ratios.

    truncate  min(rho, high): truncated importance sampling (TIS)
    mask      rho if low <= rho <= high, else 0: IcePop with token ratios, MIS with sequence ratios

    Masked tokens still count in the denominator of the loss. `ratios` are [B, T] as from
    `importance_ratios`, and so are the weights, 0 off the mask. `truncate` does not read low.

    Source: Yao et al. 2025 (TIS), https://fengyao.notion.site/off-policy-rl; Ling Team 2025
        (IcePop), https://arxiv.org/abs/2510.18855; Liu, Li et al. 2025 (MIS),
        https://richardli.xyz/rl-collapse
    """
    assert method is not CorrectionMethod.none
    truncates = method is CorrectionMethod.truncate
    low = 0.0 if truncates else low
    if not 0 <= low < high:
        raise ValueError(f"rollout correction needs 0 <= low < high; got {low=}, {high=}")
    if truncates:
        return ratios.clamp(max=high).masked_fill(~response_mask, 0.0)
    outside = (ratios < low) | (ratios > high)
    return ratios.masked_fill(outside | ~response_mask, 0.0)


def mismatch_sums(lengths: Tensor, difference: Tensor, response_mask: Tensor) -> Tensor:
    """Return [8] float64, sums over some responses for `mismatch_from`.

    `lengths` [B] int64 are those of the responses, with sum N; `difference` [N] is
    old_log_probs - rollout_log_probs, nats, finite on the mask.
    """
    difference = difference.double().masked_fill(~response_mask, 0.0)
    per_token = on_mask(difference, response_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    of_responses = torch.segment_reduce(difference, "sum", lengths=lengths)
    of_responses = of_responses.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # 0 without sampled tokens
    ends, sampled = lengths.cumsum(0), torch.nn.functional.pad(response_mask.cumsum(0), (1, 0))
    excess = torch.expm1(per_token)  # rho_t - 1, without cancellation near rho_t = 1
    tokens, log_ratio = torch.tensor(len(per_token)), per_token.sum()
    total, squares = excess.sum(), excess.dot(excess)
    return torch.stack(
        [
            tokens,
            (sampled[ends] > sampled[ends - lengths]).sum(),
            log_ratio,
            total - log_ratio,
            squares + 2 * total,
            torch.expm1(2 * of_responses).sum(),
            total + tokens,
            squares + 2 * total + tokens,
        ]
    )


def mismatch_from(parts: Sequence[Tensor]) -> dict[str, float]:
    """Compute metrics of the mismatch of trainer and sampler on the sampled tokens.

    kl: mean of rollout - old log-probs, the k1 estimate of KL(mu || pi_old) per token, nats
    kl_k3: the k3 estimate, mean of rho_t - 1 - log rho_t
    chi2_token: mean of rho_t^2 minus 1; chi2_sequence: the same for ratios of responses
    ess: effective sample size as a fraction, (sum rho_t)^2 / (N sum rho_t^2)

    `parts` are the `mismatch_sums` of parts of a batch, which has a response token.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Kong 1992 for the effective
        sample size
    """
    sums = torch.stack(list(parts)).sum(0)
    tokens, responses, log_ratio, k3, chi2, chi2_of_responses, ratio, squared = sums
    if not tokens:
        raise ValueError("mismatch metrics need a response token")
    return {
        "kl": float(-log_ratio / tokens),
        "kl_k3": float(k3 / tokens),
        "chi2_token": float(chi2 / tokens),
        "chi2_sequence": float(chi2_of_responses / responses),
        "ess": float(ratio.square() / (tokens * squared)),
    }
