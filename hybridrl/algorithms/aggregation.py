"""Aggregation of token losses to the loss of a mini-batch.

A rank calls these on the tokens of one micro-batch, with totals of the whole mini-batch on all
ranks. The losses of micro-batches and ranks, and their gradients, then add up to those of the
mini-batch, however it was partitioned. FSDP must sum gradients over ranks, not average them.

    values         [N] losses of tokens; N may be 0
    response_mask  [N] bool, true on tokens that count
    sequence_id    [N] int64, index of a token's response in the micro-batch, from 0
    totals         tokens T and responses G of the mini-batch on all ranks that count
    max_tokens     M, the longest response that may be sampled
    returns        the scalar to minimise, float32 (float64 for float64 values)
    raises         ValueError if shapes differ, the mask is not bool, or a count is not positive
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_masked, masked_sum
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals

Aggregate = Callable[[Tensor, Tensor, Tensor, Totals, int], Tensor]


def token_mean(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """Average over tokens: every token has the same weight.

    L = 1/T * sum_t l_t

    Source: Yu et al. 2025, section 3.3, https://arxiv.org/abs/2503.14476
    """
    _check("token_mean", values, response_mask, sequence_id, totals, max_tokens)
    return masked_sum(values, response_mask) / totals.tokens


def sequence_mean(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """Average over the tokens of each response, then over responses: responses weigh the same.

    L = 1/G * sum_i 1/|o_i| * sum_t l_{i,t}

    Here |o_i| is the number of tokens of response i that count.

    Source: Shao et al. 2024, equation 3, https://arxiv.org/abs/2402.03300
    """
    _check("sequence_mean", values, response_mask, sequence_id, totals, max_tokens)
    values = at_least_float32(values)
    lengths = sequence_sums(response_mask.to(values.dtype), sequence_id).clamp(min=1)
    return masked_sum(values / lengths[sequence_id], response_mask) / totals.responses


def sequence_sum(
    values: Tensor, response_mask: Tensor, sequence_id: Tensor, totals: Totals, max_tokens: int
) -> Tensor:
    """Sum over tokens, divided by a constant: no division by response lengths (Dr. GRPO).

    L = 1/(G * M) * sum_i sum_t l_{i,t}

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
    """Return [N] whose element i is the sum of `values` over the tokens of sequence i.

    The output has length N, not the number of sequences, which would synchronise with the device.
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
    check_masked(function, response_mask, values=values, sequence_id=sequence_id)
    if not (totals.tokens > 0 and totals.responses > 0 and max_tokens > 0):
        raise ValueError(f"{function} needs positive counts; got {totals} and {max_tokens=}")
