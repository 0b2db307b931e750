"""Partition of a mini-batch over ranks and into micro-batches.

A partitioner gives every rank the same number of micro-batches, none of them empty. Each fits the
token budget, except that a single longer response is a micro-batch of its own. FSDP2 gathers
weights in every layer, by default again in every micro-batch. Where ranks synchronise decides which
costs must be balanced.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from hybridrl.config.choices import Accumulation
from hybridrl.config.schema import FSDPConfig
from hybridrl.data.balance import balance_totals, pack_evenly

Micros = list[list[int]]
# (mini-batch, cost by response, tokens by response, ranks, budget) -> each rank's micro-batches
Partitioner = Callable[[list[int], Sequence[float], Sequence[int], int, int], list[Micros]]


def partitioner_for(fsdp: FSDPConfig) -> Partitioner:
    """Choose the partitioner for a sharding spec.

    Ranks synchronise once per optimizer step if nothing is sharded, or if weights stay gathered
    after forward and gradients accumulate unsharded (distributed/accumulation.py). Then their total
    costs are balanced; otherwise the cost of each micro-batch.
    """
    gathered = not fsdp.reshard_after_forward and fsdp.accumulation is Accumulation.full
    return partition_by_total if gathered or fsdp.dp_shard == 1 else partition_by_micro_batch


def partition_by_micro_batch(
    mini: list[int],
    cost: Sequence[float],
    tokens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
) -> list[Micros]:
    """Balance the k-th micro-batches of all ranks, with as few micro-batches as possible.

    Micro-batches are sorted by cost, most expensive first, and assigned to ranks in alternating
    direction.
    """
    count = _fewest(mini, tokens, num_ranks, max_tokens)
    micros = None
    while micros is None:
        micros = pack_evenly(mini, cost, tokens, num_ranks * count, max_tokens)
        count += 1
    micros.sort(key=lambda micro: -_sum(cost, micro))
    ranks: list[Micros] = [[] for _ in range(num_ranks)]
    for k, micro in enumerate(micros):
        row, column = divmod(k, num_ranks)
        ranks[column if row % 2 == 0 else num_ranks - 1 - column].append(micro)
    return ranks


def partition_by_total(
    mini: list[int],
    cost: Sequence[float],
    tokens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
) -> list[Micros]:
    """Balance the total cost of ranks, each packed into as few micro-batches as all ranks need.

    A response of unusual length then delays no rank. Ranks still synchronise in the first forward
    and the last backward: micro-batches of about the median cost are placed there.
    """
    count = _fewest(mini, tokens, num_ranks, max_tokens)
    while True:
        parts = balance_totals(mini, cost, num_ranks, at_least=count)
        packed = [pack_evenly(part, cost, tokens, count, max_tokens) for part in parts]
        ranks = [micros for micros in packed if micros is not None]
        if len(ranks) == num_ranks:
            median = statistics.median(_sum(cost, micro) for micros in ranks for micro in micros)
            return [_median_at_both_ends(micros, cost, median) for micros in ranks]
        count += 1


def _median_at_both_ends(micros: Micros, cost: Sequence[float], median: float) -> Micros:
    """Sort micro-batches by distance from the median cost, the nearest moved to the end."""
    nearest, *rest = sorted(micros, key=lambda micro: abs(_sum(cost, micro) - median))
    return [*rest, nearest]


def _fewest(mini: list[int], tokens: Sequence[int], num_ranks: int, max_tokens: int) -> int:
    """Return a lower bound on micro-batches per rank; one response each always fits."""
    least = sum(min(tokens[i], max_tokens) for i in mini) / (num_ranks * max_tokens)
    return min(math.ceil(least), len(mini) // num_ranks)


def _sum(cost: Sequence[float], micro: list[int]) -> float:
    return sum(cost[i] for i in micro)
