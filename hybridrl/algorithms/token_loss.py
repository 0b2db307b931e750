"""Parts shared by the policy losses: the type of a token loss, the policy ratio, metrics.

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

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO
from hybridrl.algorithms.masked import at_least_float32, check_masked, masked_sum

Sums = dict[str, Tensor]


class TokenLoss(NamedTuple):
    """Term of the loss, token by token.

    Attributes:
        values: [N] with graph, float32 (float64 for float64 input), to minimise; 0 off the mask.
        sums: metrics as detached sums over the tokens that count, to be summed over ranks and
            divided by the number of these tokens.
    """

    values: Tensor
    sums: Sums


def log_ratio_of(function: str, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return [N] log_probs - old_log_probs clamped to +-MAX_LOG_RATIO, 0 off the mask; nats.

    Clamped values have gradient 0. Ratio times advantage then stays finite in float32. `function`
    begins the text of errors.
    """
    check_masked(function, mask, log_probs=log_probs, old_log_probs=old_log_probs)
    difference = at_least_float32(log_probs) - at_least_float32(old_log_probs)
    return difference.masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def advantages_of(function: str, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return [N] advantages, 0 off the mask."""
    check_masked(function, mask, advantages=advantages)
    return at_least_float32(advantages).masked_fill(~mask, 0.0)


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
