"""Parts shared by the policy losses: type of a token loss, policy ratio, metrics, aggregation.

A rank aggregates the tokens of one micro-batch, with totals of the whole mini-batch on all ranks.
The losses of micro-batches and ranks, and their gradients, then add up to those of the mini-batch,
however it was partitioned. FSDP must sum gradients over ranks, not average them.

Shapes:  N = tokens of a micro-batch, concatenated responses; N may be 0
Masks:   true on tokens that count; values off the mask, even NaN, have no effect
Errors:  a ValueError if shapes differ, a mask is not bool or a setting is out of range

    log_probs          [N] the current weights', with graph, nats
    old_log_probs      [N] those before this step's updates, nats
    rollout_log_probs  [N] as the sampler reported them, nats
    advantages         [N] A_t
    response_mask      [N] bool
    sequence_id        [N] int64, index of a token's response in the micro-batch, from 0
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.masked import (
    MAX_LOG_RATIO,
    WrongReturn,
    at_least_float32,
    check_masked,
    described,
    masked_sum,
)
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals

Sums = dict[str, Tensor]


class TokenLoss(NamedTuple):
    """Term of the loss, token by token.

    Attributes:
        values: [N] with graph, float32 (float64 for float64 input), to minimise; 0 off the mask.
        sums: metrics as detached sums over the tokens that count, to be summed over ranks and
            divided by the number of these tokens; or [2], a sum and the count that divides it.
    """

    values: Tensor
    sums: Sums


def as_token_loss(result: Any, function: str, log_probs: Tensor) -> TokenLoss:
    """Convert the result of `function`: a TokenLoss, or its values alone, without metrics.

    Raises:
        WrongReturn: values are no float tensor [N] as log_probs, or a sum is no scalar.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    values, sums = result if is_pair else (result, {})
    fits = isinstance(values, Tensor) and values.shape == log_probs.shape
    if not (fits and values.is_floating_point() and isinstance(sums, dict)):
        raise WrongReturn(
            f"{function} returned {described(result)}, expected the loss of each token, a float32 "
            f"Tensor of shape {tuple(log_probs.shape)} as log_probs, or TokenLoss(values, sums).\n"
            f"Return no mean or sum over tokens: algorithm.aggregation says which is taken."
        )
    scalars = {name: torch.as_tensor(value).detach() for name, value in sums.items()}
    for name, scalar in scalars.items():
        if scalar.shape not in ((), (2,)):
            raise WrongReturn(
                f"{function} returned the sum {name} as {described(scalar)}, expected a scalar: "
                f"the sum over the tokens of response_mask; or a sum and the count that divides it."
            )
    return TokenLoss(values, scalars)


def policy_inputs(
    function: str, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [N] log_probs - old_log_probs, nats, and [N] advantages; 0 off the mask.

    Log-ratios are clamped to +-MAX_LOG_RATIO, with gradient 0 there: ratio times advantage then
    stays finite in float32. `function` begins the text of errors.
    """
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    check_masked(function, mask, **tensors)
    difference = at_least_float32(log_probs) - at_least_float32(old_log_probs)
    log_ratio = difference.masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio, at_least_float32(advantages).masked_fill(~mask, 0.0)


def policy_sums(log_ratio: Tensor, clipped: Tensor, mask: Tensor) -> Sums:
    """Compute the metrics of every policy loss, as sums.

    ratio; clip_fraction: `clipped` tokens, whose gradient the method removes or reduces; approx_kl:
    k3 of KL(old || current), nats.
    """
    log_ratio = log_ratio.detach()
    return {
        "ratio": masked_sum(log_ratio.exp(), mask),
        "clip_fraction": masked_sum(clipped, mask),
        "approx_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
    }


def aggregate(
    kind: Aggregation,
    values: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    totals: Totals,
    max_tokens: int,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Compute the loss L of a mini-batch, or a micro-batch's part of it, from token losses l.

    token_mean     L = 1/T * sum_i sum_t l_{i,t}               tokens weigh the same
    sequence_mean  L = 1/E * sum_i 1/|o_i| * sum_t l_{i,t}     responses weigh the same
    sequence_sum   L = 1/(E * M) * sum_i sum_t l_{i,t}         no division by lengths (Dr. GRPO)

    Here |o_i| is the number of tokens of response i that count. An agent's episode counts as one
    response, however many sequences it has: |o_i| is then that of the whole episode.

    Args:
        kind: of the average.
        values: [N] l, losses of tokens.
        response_mask, sequence_id: [N] as above.
        totals: T tokens that count, and E episodes with such tokens, of the mini-batch; > 0.
        max_tokens: M, the longest response that may be sampled; > 0.
        episode_tokens: [responses of the micro-batch] int64, |o_i| where an episode has several
            responses; None: each is an episode.

    Returns:
        Scalar to minimise, float32 (float64 for float64 values).

    Source: Yu et al. 2025, section 3.3, https://arxiv.org/abs/2503.14476; Shao et al. 2024,
        equation 3, https://arxiv.org/abs/2402.03300; Liu et al. 2025 (Dr. GRPO), section 3.1,
        https://arxiv.org/abs/2503.20783
    """
    check_masked(kind, response_mask, values=values, sequence_id=sequence_id)
    if not (totals.tokens > 0 and totals.episodes > 0 and max_tokens > 0):
        raise ValueError(f"{kind} needs positive counts; got {totals} and {max_tokens=}")
    if kind is Aggregation.token_mean:
        return masked_sum(values, response_mask) / totals.tokens
    if kind is Aggregation.sequence_sum:
        return masked_sum(values, response_mask) / (totals.episodes * max_tokens)
    values = at_least_float32(values)
    if episode_tokens is None:
        lengths = sequence_sums(response_mask.to(values.dtype), sequence_id)
    else:
        lengths = episode_tokens.to(values.dtype)
    weighted = values / lengths.clamp(min=1)[sequence_id]
    return masked_sum(weighted, response_mask) / totals.episodes


def sequence_sums(values: Tensor, sequence_id: Tensor) -> Tensor:
    """Return [N] whose element i is the sum of `values` over the tokens of sequence i.

    The output has length N, not the number of sequences, which would synchronise with the device.
    """
    return torch.zeros_like(values).index_add(0, sequence_id, values)
