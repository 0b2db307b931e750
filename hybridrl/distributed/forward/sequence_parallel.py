"""Ulysses sequence parallelism: the ranks of a group share each packed forward.

Shapes:  N = packed tokens   n = tokens of this rank's shard   U = ranks of the group
         H, K = query, key heads   h, k = those of one rank   D = head size   F = features

Rank r computes all per-token operations on tokens N r / U to N (r + 1) / U. In attention, which
needs all tokens but treats heads separately, a rank has all tokens and 1 / U of the heads. This
takes one all-to-all before attention and one after:

    [n, H + 2 K, D] -> all-to-all -> [N, h + 2 k, D] -> attention -> [N, h, D]
                    -> all-to-all -> [n, H, D]

The exchanges are custom operators: torch.compile keeps them and their backward in one graph with
the layer around them.

Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.distributed.torch_compat import group_named


@dataclass(frozen=True)
class SequenceGroup:
    """Group of ranks that share sequences: its name for operators, U > 1, this rank's number."""

    name: str
    size: int
    rank: int


def sequence_group(size: int) -> SequenceGroup | None:
    """Return this rank's group of `size` consecutive global ranks; a collective over all ranks.

    All roles of a process share one group and its communication buffers. None for groups of one.
    """
    if size == 1:
        return None
    return _sequence_group(size, dist.group.WORLD)


@lru_cache(maxsize=1)
def _sequence_group(size: int, world: ProcessGroup) -> SequenceGroup:
    group, _ = dist.new_subgroups(size)
    return SequenceGroup(group.group_name, size, world.rank() % size)


def shard_sizes(num_tokens: int, num_ranks: int) -> list[int]:
    """Return the tokens of each rank's shard; they differ by at most one."""
    ends = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
    return [end - start for start, end in pairwise(ends)]


def heads_of_all_tokens(
    query: Tensor, key: Tensor, value: Tensor, num_tokens: int, group: SequenceGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of all tokens, from all heads of its own tokens.

    With fewer key heads than ranks, each is sent to all ranks with a query head of its group. The
    returned gradients are added.

    query is [n, H, D], key and value are [n, K, D]; U divides H, and K or K divides U. Returns
    [N, h, D] and twice [N, k, D], views.
    """
    if key.shape[1] < group.size:
        copies = group.size // key.shape[1]
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    blocks = [x.unflatten(1, (group.size, -1)) for x in (query, key, value)]
    heads = [block.shape[2] for block in blocks]
    # [n, U, heads, D] -> [U, n, heads, D]: the rows for one rank are adjacent.
    sent = torch.cat(blocks, dim=2).transpose(0, 1).flatten(0, 1)
    rows = [len(query)] * group.size
    received = exchange(sent.flatten(1), rows, shard_sizes(num_tokens, group.size), group.name)
    q, k, v = received.unflatten(1, (-1, query.shape[2])).split(heads, dim=1)
    return q, k, v


def tokens_of_all_heads(output: Tensor, num_tokens: int, group: SequenceGroup) -> Tensor:
    """Return all heads of this rank's n tokens, [n, H, D], from its heads of all, [N, h, D]."""
    rows = [num_tokens] * group.size
    received = exchange(output.flatten(1), shard_sizes(len(output), group.size), rows, group.name)
    by_rank = received.view(group.size, num_tokens, *output.shape[1:])
    return by_rank.transpose(0, 1).flatten(1, 2)


@torch.library.custom_op("hybridrl::exchange", mutates_args=())
def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], group_name: str) -> Tensor:
    """Send send[r] rows to rank r, in rank order, and receive receive[r] rows from it."""
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    group = group_named(group_name)
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


@exchange.register_fake
def _received(rows: Tensor, send: Sequence[int], receive: Sequence[int], group_name: str) -> Tensor:
    return rows.new_empty(sum(receive), *rows.shape[1:])


def _remember_way_back(
    ctx: Any, inputs: tuple[Tensor, Sequence[int], Sequence[int], str], output: Tensor
) -> None:
    _, *ctx.way = inputs


def _way_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    send, receive, group_name = ctx.way
    return exchange(grad, receive, send, group_name), None, None, None


exchange.register_autograd(_way_back, setup_context=_remember_way_back)


class GatherSequence(torch.autograd.Function):
    """Gather of [r] values of each rank to [R] on all ranks, in rank order.

    Every rank computes the same loss of the gathered values. Backward keeps only the gradient of
    the rank's own values: FSDP2's sum over ranks is then the gradient of one loss, not of U.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, counts: Sequence[int], group: SequenceGroup) -> Tensor:
        """Gather the values; `counts[r]` come from rank r."""
        ctx.counts, ctx.rank = counts, group.rank
        send = [len(values)] * group.size
        return exchange(values.repeat(group.size), send, counts, group.name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's own values."""
        return grads[0].split(ctx.counts)[ctx.rank], None, None
