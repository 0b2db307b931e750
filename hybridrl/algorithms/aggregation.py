"""Aggregation of token losses to the loss of a mini-batch.

A rank calls this on the tokens of one micro-batch, with totals of the whole mini-batch on all
ranks. The losses of micro-batches and ranks, and their gradients, then add up to those of the
mini-batch, however it was partitioned. FSDP must sum gradients over ranks, not average them.
"""

import torch
from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32, check_masked, masked_sum
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals


def aggregate(
    kind: Aggregation,
    values: Tensor,
    response_mask: Tensor,
    sequence_id: Tensor,
    totals: Totals,
    max_tokens: int,
) -> Tensor:
    """Compute the loss L of a mini-batch, or a micro-batch's part of it, from token losses l.

    token_mean     L = 1/T * sum_i sum_t l_{i,t}               tokens weigh the same
    sequence_mean  L = 1/G * sum_i 1/|o_i| * sum_t l_{i,t}     responses weigh the same
    sequence_sum   L = 1/(G * M) * sum_i sum_t l_{i,t}         no division by lengths (Dr. GRPO)

    Here |o_i| is the number of tokens of response i that count.

    Args:
        kind: of the average.
        values: [N] l, losses of tokens; N may be 0.
        response_mask: [N] bool, true on tokens that count.
        sequence_id: [N] int64, index of a token's response in the micro-batch, from 0.
        totals: T tokens that count, and G responses with such tokens, of the mini-batch.
        max_tokens: M, the longest response that may be sampled.

    Returns:
        Scalar to minimise, float32 (float64 for float64 values).

    Raises:
        ValueError: shapes differ, the mask is not bool, or a total or max_tokens is not positive.

    Source: Yu et al. 2025, section 3.3, https://arxiv.org/abs/2503.14476; Shao et al. 2024,
        equation 3, https://arxiv.org/abs/2402.03300; Liu et al. 2025 (Dr. GRPO), section 3.1,
        https://arxiv.org/abs/2503.20783
    """
    check_masked(kind, response_mask, values=values, sequence_id=sequence_id)
    if not (totals.tokens > 0 and totals.responses > 0 and max_tokens > 0):
        raise ValueError(f"{kind} needs positive counts; got {totals} and {max_tokens=}")
    if kind is Aggregation.token_mean:
        return masked_sum(values, response_mask) / totals.tokens
    if kind is Aggregation.sequence_sum:
        return masked_sum(values, response_mask) / (totals.responses * max_tokens)
    values = at_least_float32(values)
    lengths = sequence_sums(response_mask.to(values.dtype), sequence_id).clamp(min=1)
    return masked_sum(values / lengths[sequence_id], response_mask) / totals.responses


def sequence_sums(values: Tensor, sequence_id: Tensor) -> Tensor:
    """Return [N] whose element i is the sum of `values` over the tokens of sequence i.

    The output has length N, not the number of sequences, which would synchronise with the device.
    """
    return torch.zeros_like(values).index_add(0, sequence_id, values)
