"""Reductions of scalars over all ranks, and the time limit of collectives.

The driver ends a call without progress (cluster.stall_timeout_s). A limit in torch, by default
30 minutes and 10 with NCCL, would also end ranks that wait for a busy one.
"""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.torch_compat import set_timeouts

# Longer than any wait in a call; 31 bits hold at most 24 days of milliseconds.
NO_LIMIT = timedelta(days=24)


def sum_over_ranks(values: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Return sums of scalars over all ranks, in float64, by one collective.

    Names and their order must be the same on all ranks.
    """
    return _reduce(values, device, dist.ReduceOp.SUM)


def max_over_ranks(values: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """Return maxima of scalars over all ranks, by one collective; see `sum_over_ranks`."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def lift_limits() -> None:
    """Remove the time limit of collectives in all process groups of this process, vLLM's too."""
    set_timeouts(NO_LIMIT)


def _reduce(
    values: Mapping[str, Tensor], device: torch.device, op: dist.ReduceOp.RedOpType
) -> dict[str, float]:
    stacked = torch.stack([torch.as_tensor(v).to(device, torch.float64) for v in values.values()])
    dist.all_reduce(stacked, op=op)
    return dict(zip(values, stacked.tolist(), strict=True))
