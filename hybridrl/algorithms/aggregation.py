"""From the losses of tokens to the loss of a mini-batch.

A rank calls these on the tokens of one micro-batch with the totals of the whole mini-batch, over
all ranks. Then the losses of the parts, and their gradients, add up to those of the whole, however
its responses were spread (FSDP's averaging over ranks must be off).

Shapes:  N = tokens of a micro-batch, responses one behind the other; N may be 0
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_mask, check_same_shape, masked_sum
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals

# (token losses, mask, sequence_id, totals, max_tokens) -> the scalar to minimise
Aggregate = Callable[[Tensor, Tensor, Tensor, Totals, int], Tensor]


def token_mean(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """L = 1/T * sum_t l_t, T the mini-batch's tokens: every token weighs the same.

    Args:
        values: [N] losses of tokens.
        response_mask: [N] bool, true on tokens that count.
        sequence_id: [N] int64, which response a token belongs to; not read.
        totals: of the mini-batch, over all ranks.
        max_tokens: not read.

    Returns:
        Scalar, float32 (float64 for float64 values).

    Raises:
        ValueError: shapes differ, the mask is not bool, or a total is not positive.

    Source: Yu et al. 2025, section 3.3, https://arxiv.org/abs/2503.14476
    """
    _check("token_mean", values, response_mask, sequence_id, totals, max_tokens)
    return masked_sum(values, response_mask) / totals.tokens


def sequence_mean(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """L = 1/G * sum_i 1/|o_i| * sum_t l_{i,t}: every response weighs the same.

    G is the mini-batch's responses with a token that counts, |o_i| the number of these in i.

    Args:
        values: [N] losses of tokens.
        response_mask: [N] bool, true on tokens that count.
        sequence_id: [N] int64, which response of the micro-batch a token belongs to, from 0 on.
        totals: of the mini-batch, over all ranks.
        max_tokens: not read.

    Returns:
        Scalar, float32 (float64 for float64 values).

    Raises:
        ValueError: shapes differ, the mask is not bool, or a total is not positive.

    Source: Shao et al. 2024, equation 3, https://arxiv.org/abs/2402.03300
    """
    _check("sequence_mean", values, response_mask, sequence_id, totals, max_tokens)
    values = at_least_float32(values)
    lengths = sequence_sums(response_mask.to(values.dtype), sequence_id).clamp(min=1)
    return masked_sum(values / lengths[sequence_id], response_mask) / totals.responses


def sequence_sum(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """L = 1/(G * M) * sum_i sum_t l_{i,t}, M a constant: no response's length divides anything.

    Args:
        values: [N] losses of tokens.
        response_mask: [N] bool, true on tokens that count.
        sequence_id: [N] int64, which response a token belongs to; not read.
        totals: of the mini-batch, over all ranks.
        max_tokens: M, the longest response that may be sampled.

    Returns:
        Scalar, float32 (float64 for float64 values).

    Raises:
        ValueError: shapes differ, the mask is not bool, or a total or max_tokens is not positive.

    Source: Liu et al. 2025 (Dr. GRPO), section 3.1, https://arxiv.org/abs/2503.20783
    """
    _check("sequence_sum", values, response_mask, sequence_id, totals, max_tokens)
    return masked_sum(values, response_mask) / (totals.responses * max_tokens)


AGGREGATIONS: Mapping[Aggregation, Aggregate] = MappingProxyType(
    {
        Aggregation.token_mean: token_mean,
        Aggregation.sequence_mean: sequence_mean,
        Aggregation.sequence_sum: sequence_sum,
    }
)


def sequence_sums(values: Tensor, sequence_id: Tensor) -> Tensor:
    """[N]: at place i the sum of `values` over the tokens of sequence i, 0 where there is none.

    As long as the tokens are many, so that nothing waits for the device to count the sequences.
    """
    return torch.zeros_like(values).index_add(0, sequence_id, values)


def _check(
    function: str,
    values: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    totals: Totals,
    max_tokens: int,
) -> None:
    check_same_shape(function, values=values, response_mask=response_mask, sequence_id=sequence_id)
    check_mask(function, response_mask)
    if not (totals.tokens > 0 and totals.responses > 0 and max_tokens > 0):
        raise ValueError(f"{function} needs positive counts; got {totals} and {max_tokens=}")
