"""Small reductions over all ranks: what metrics and token counts need."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Sums of scalars over all ranks, in float64, by one collective.

    Every rank must give the same names in the same order.
    """
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Largest of scalars over all ranks, by one collective; names as in `sum_over_ranks`."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def _reduce(
    values: Mapping[str, Tensor], device: torch.device, op: dist.ReduceOp.RedOpType
) -> dict[str, float]:
    stacked = torch.stack([torch.as_tensor(v).to(device, torch.float64) for v in values.values()])
    dist.all_reduce(stacked, op=op)
    return dict(zip(values, stacked.tolist(), strict=True))
