"""Preference losses: DPO and IPO of pairs of responses, KTO of single responses.

They compare whole responses. The log-ratio of response i to the frozen reference is

    h_i = sum_t m_t (log_probs_t - ref_log_probs_t),   nats

and beta h_i its implicit reward, up to a term of the prompt (Rafailov et al. 2023, equation 5).
Each token of a pair, in KTO of a response, has the loss of the whole. A pair is one episode, so
`algorithm.aggregation = sequence_mean` gives the mean over pairs or responses.

Tensors and errors are in token_loss.py; besides

    ref_log_probs   [N] the reference's, nats
    preferred       [N] bool, true on the tokens of preferred responses
    sequence_id     [N] int64; in pairs, responses 2k and 2k + 1 are pair k, in any order
    kl_baseline     [N] z_0, equal on all tokens, nats

Metrics have counts of their own (`TokenLoss`). Of preferred responses and of the others: reward_*,
beta h, and log_prob_*, of whole responses. Of pairs: reward_margin, and preference_accuracy, the
share with a margin above 0.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.masked import at_least_float32, check_masked
from hybridrl.algorithms.token_loss import Sums, TokenLoss, sequence_sums


def dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    preferred: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> TokenLoss:
    """Compute direct preference optimisation, with label smoothing.

    l = -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m),   m = h_chosen - h_rejected

    beta > 0 is the weight of the KL against the reference. e = label_smoothing, in [0, 0.5), is the
    share of pairs whose responses are taken to be swapped; 0 in the paper.

    Source: Rafailov et al. 2023, equation 7, https://arxiv.org/abs/2305.18290; Mitchell 2023,
        equation 3, https://ericmitchell.ai/cdpo.pdf, for label smoothing
    """
    if not (beta > 0 and 0 <= label_smoothing < 0.5):
        raise ValueError(
            f"dpo needs beta > 0 and 0 <= label_smoothing < 0.5; got {beta=}, {label_smoothing=}"
        )
    log_ratio = _log_ratio("dpo", log_probs, ref_log_probs, response_mask)
    margin, pair = _pairs(log_ratio, sequence_id, preferred)
    right, swapped = logsigmoid(beta * margin), logsigmoid(-beta * margin)
    loss = -(1 - label_smoothing) * right - label_smoothing * swapped
    sums = _metrics(log_probs, log_ratio, response_mask, sequence_id, preferred, beta, margin)
    return TokenLoss(loss[pair].masked_fill(~response_mask, 0.0), sums)


def ipo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    preferred: Tensor,
    *,
    beta: float,
) -> TokenLoss:
    """Compute identity preference optimisation: the margin has a target, beyond which it costs.

    l = (m - 1 / (2 beta))^2,   m = h_chosen / |chosen| - h_rejected / |rejected|

    beta > 0 is tau in the paper, whose h are sums; means over tokens, as in TRL's trainer, keep the
    target independent of lengths.

    Source: Azar et al. 2023, equation 17, https://arxiv.org/abs/2310.12036
    """
    if not beta > 0:
        raise ValueError(f"ipo needs beta > 0; got {beta=}")
    log_ratio = _log_ratio("ipo", log_probs, ref_log_probs, response_mask)
    lengths = sequence_sums(response_mask.to(log_ratio.dtype), sequence_id)
    margin, pair = _pairs(log_ratio / lengths.clamp(min=1)[sequence_id], sequence_id, preferred)
    loss = (margin - 1 / (2 * beta)).square()
    sums = _metrics(log_probs, log_ratio, response_mask, sequence_id, preferred, beta, margin)
    return TokenLoss(loss[pair].masked_fill(~response_mask, 0.0), sums)


def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    preferred: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> TokenLoss:
    """Compute Kahneman-Tversky optimisation, of responses that are desirable or not.

    l_i = desirable_weight (1 - sigmoid(beta (h_i - z_0)))      if i is preferred
    l_i = undesirable_weight (1 - sigmoid(beta (z_0 - h_i)))    else

    z_0 >= 0 estimates the policy's KL against the reference, from responses to other prompts; it
    has no gradient. beta and the weights are > 0.

    Source: Ethayarajh et al. 2024, equation 8, https://arxiv.org/abs/2402.01306
    """
    if not (beta > 0 and desirable_weight > 0 and undesirable_weight > 0):
        raise ValueError(
            f"kto needs settings > 0; got {beta=}, {desirable_weight=}, {undesirable_weight=}"
        )
    log_ratio = _log_ratio("kto", log_probs, ref_log_probs, response_mask)
    above = sequence_sums(log_ratio, sequence_id)[sequence_id] - at_least_float32(kl_baseline)
    loss = 1 - torch.sigmoid(beta * torch.where(preferred, above, -above))
    loss = torch.where(preferred, desirable_weight * loss, undesirable_weight * loss)
    sums = _metrics(log_probs, log_ratio, response_mask, sequence_id, preferred, beta)
    return TokenLoss(loss.masked_fill(~response_mask, 0.0), sums)


def bradley_terry(scores: Tensor, preferred: Tensor) -> TokenLoss:
    """Compute a reward model's loss by pair, [P], with the metrics of pairs.

    l = -log sigmoid(r_chosen - r_rejected)

    scores are [2P] float32 with graph: responses 2k and 2k + 1 are pair k. preferred is [2P] bool.

    Source: Ouyang et al. 2022, equation 1, https://arxiv.org/abs/2203.02155; Bradley and Terry 1952
    """
    margin = torch.where(preferred, scores, -scores).view(-1, 2).sum(1)
    every, own = torch.ones_like(margin, dtype=torch.bool), scores.detach()
    sums = {
        "reward_chosen": _with_count(own, preferred),
        "reward_rejected": _with_count(own, ~preferred),
        "reward_margin": _with_count(margin.detach(), every),
        "preference_accuracy": _with_count((margin > 0).to(own.dtype), every),
    }
    return TokenLoss(-logsigmoid(margin), sums)


def _log_ratio(function: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return [N] log_probs - ref_log_probs, 0 off the mask."""
    check_masked(function, mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    difference = at_least_float32(log_probs) - at_least_float32(ref_log_probs)
    return difference.masked_fill(~mask, 0.0)


def _pairs(values: Tensor, sequence_id: Tensor, preferred: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N] chosen minus rejected sums of `values` by pair, and [N] the pair of each token.

    As in `sequence_sums`, elements beyond the number of pairs are 0.
    """
    pair = sequence_id // 2
    return sequence_sums(torch.where(preferred, values, -values), pair), pair


def _metrics(
    log_probs: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    sequence_id: Tensor,
    preferred: Tensor,
    beta: float,
    margin: Tensor | None = None,
) -> Sums:
    """Compute the metrics of responses and, with their `margin` [N] by pair, of pairs."""
    own = at_least_float32(log_probs.detach()).masked_fill(~mask, 0.0)
    present = sequence_sums(mask.long(), sequence_id) > 0
    is_chosen = sequence_sums((preferred & mask).long(), sequence_id) > 0
    sums: Sums = {}
    for name, values in (("reward", beta * log_ratio.detach()), ("log_prob", own)):
        whole = sequence_sums(values, sequence_id)
        sums[f"{name}_chosen"] = _with_count(whole, present & is_chosen)
        sums[f"{name}_rejected"] = _with_count(whole, present & ~is_chosen)
    if margin is not None:
        present, margin = sequence_sums(mask.long(), sequence_id // 2) > 0, beta * margin.detach()
        sums["reward_margin"] = _with_count(margin, present)
        sums["preference_accuracy"] = _with_count((margin > 0).to(margin.dtype), present)
    return sums


def _with_count(values: Tensor, counted: Tensor) -> Tensor:
    """Return [2]: the sum of `values` where `counted`, and the number of these."""
    counts = counted.to(values.dtype)
    return torch.stack([(values * counts).sum(), counts.sum()])
