"""What the policy losses share: losses token by token, the policy ratio, and what is reported.

Shapes:  N = tokens of a micro-batch, responses one behind the other; N may be 0
Masks:   true on tokens that count; what stands off the mask, even NaN, counts for nothing
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.kl import MAX_LOG_RATIO
from hybridrl.algorithms.masked import at_least_float32, check_mask, check_same_shape, masked_sum

Sums = dict[str, Tensor]


class TokenLoss(NamedTuple):
    """A term of the objective, token by token.

    Attributes:
        values: [N] with graph, float32 (float64 for float64 input), to be minimised; 0 off the
            mask.
        sums: detached sums over the tokens that count; reduced over ranks and divided by their
            number they are means.
    """

    values: Tensor
    sums: Sums


def log_ratio_of(function: str, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N] log_probs - old_log_probs within +-MAX_LOG_RATIO, 0 off the mask; nats.

    Beyond the bound it has no gradient, so that a ratio times an advantage stays finite in float32.

    Raises:
        ValueError: shapes differ, or the mask is not bool.
    """
    check_same_shape(function, log_probs=log_probs, old_log_probs=old_log_probs, response_mask=mask)
    check_mask(function, mask)
    difference = at_least_float32(log_probs) - at_least_float32(old_log_probs)
    return difference.masked_fill(~mask, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def advantages_of(function: str, advantages: Tensor, mask: Tensor) -> Tensor:
    """[N] advantages, 0 off the mask.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(function, advantages=advantages, response_mask=mask)
    return at_least_float32(advantages).masked_fill(~mask, 0.0)


def policy_sums(log_ratio: Tensor, held_back: Tensor, mask: Tensor) -> Sums:
    """What every policy loss reports.

    Args:
        log_ratio: [N] nats, as from `log_ratio_of`.
        held_back: [N] bool, true on tokens whose gradient the method cut or weakened.
        mask: [N] bool.

    Returns:
        ratio; clip_fraction: tokens held back; approx_kl: k3 of KL(old || current), nats.
    """
    log_ratio = log_ratio.detach()
    return {
        "ratio": masked_sum(log_ratio.exp(), mask),
        "clip_fraction": masked_sum(held_back, mask),
        "approx_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
    }
