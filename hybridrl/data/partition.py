"""Partition of items into parts of nearly equal cost: mini-batches over ranks, into micro-batches.

A partitioner gives every rank the same number of micro-batches, none of them empty. Each fits the
token budget, unless it is a single longer response. Agents' sequences, whose number ranks need not
divide, may also exceed it where a rank has too few. FSDP2 gathers weights in every layer, by
default again in every micro-batch. Where ranks synchronise decides which costs must be balanced.
"""

import heapq
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from hybridrl.config.choices import Accumulation
from hybridrl.config.schema import FSDPConfig

Micros = list[list[int]]
# (mini-batch, cost by response, tokens by response, ranks, budget) -> each rank's micro-batches
Partitioner = Callable[[list[int], Sequence[float], Sequence[int], int, int], list[Micros]]


def partitioner_for(fsdp: FSDPConfig) -> Partitioner:
    """Choose the partitioner for a sharding spec.

    Ranks synchronise once per optimizer step if nothing is sharded, or if weights stay gathered
    after forward and gradients accumulate unsharded (distributed/fsdp.py). Then their total
    costs are balanced; otherwise the cost of each micro-batch.
    """
    gathered = not fsdp.reshard_after_forward and fsdp.accumulation is Accumulation.full
    return partition_by_total if gathered or fsdp.dp_shard == 1 else partition_by_micro_batch


def partition_by_micro_batch(
    mini: list[int], cost: Sequence[float], tokens: Sequence[int], num_ranks: int, max_tokens: int
) -> list[Micros]:
    """Balance the k-th micro-batches of all ranks, with as few micro-batches as possible.

    Micro-batches are sorted by cost, most expensive first, and assigned to ranks in alternating
    direction.
    """
    sizes = _sizes(mini, tokens, num_ranks, max_tokens)
    packed = (pack_evenly(mini, cost, tokens, num_ranks * n, budget) for n, budget in sizes)
    micros = next(micros for micros in packed if micros is not None)
    micros.sort(key=lambda micro: -_sum(cost, micro))
    ranks: list[Micros] = [[] for _ in range(num_ranks)]
    for k, micro in enumerate(micros):
        row, column = divmod(k, num_ranks)
        ranks[column if row % 2 == 0 else num_ranks - 1 - column].append(micro)
    return ranks


def partition_by_total(
    mini: list[int], cost: Sequence[float], tokens: Sequence[int], num_ranks: int, max_tokens: int
) -> list[Micros]:
    """Balance the total cost of ranks, each packed into as few micro-batches as all ranks need.

    A response of unusual length then delays no rank. Ranks still synchronise in the first forward
    and the last backward: micro-batches of about the median cost are placed there.
    """
    for count, budget in _sizes(mini, tokens, num_ranks, max_tokens):
        parts = balance_totals(mini, cost, num_ranks, at_least=count)
        packed = [pack_evenly(part, cost, tokens, count, budget) for part in parts]
        ranks = [micros for micros in packed if micros is not None]
        if len(ranks) == num_ranks:
            median = statistics.median(_sum(cost, micro) for micros in ranks for micro in micros)
            for micros in ranks:
                micros.sort(key=lambda micro: abs(_sum(cost, micro) - median))
            return [[*micros[1:], micros[0]] for micros in ranks]
    raise AssertionError("with a large budget everything fits")


def _sizes(
    mini: list[int], tokens: Sequence[int], num_ranks: int, max_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yield counts of micro-batches per rank, from a lower bound, and their token budget.

    After the most that leave none empty, it is that count with growing budgets.
    """
    least = sum(min(tokens[i], max_tokens) for i in mini) / (num_ranks * max_tokens)
    most = len(mini) // num_ranks
    assert most, "fewer responses than ranks"
    yield from ((count, max_tokens) for count in range(min(math.ceil(least), most), most + 1))
    while True:
        max_tokens += 1 + max_tokens // 8
        yield most, max_tokens


def _sum(cost: Sequence[float], micro: list[int]) -> float:
    return sum(cost[i] for i in micro)


def balance(items: Sequence[int], cost: Sequence[float], num_parts: int) -> list[list[int]]:
    """Partition items into parts of equal count (to 1) with nearly equal sums of `cost[item]`."""
    counts = [len(items) // num_parts + (p < len(items) % num_parts) for p in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for item, part in _cheapest(items, cost, num_parts, lambda p, _: len(parts[p]) < counts[p]):
        parts[part].append(item)
    return parts


def balance_totals(
    items: Sequence[int], cost: Sequence[float], num_parts: int, at_least: int
) -> list[list[int]]:
    """Partition items into parts of nearly equal sums of `cost[item]`, with a minimum count.

    Without the minimum, the largest sum is at most 4/3 - 1 / (3 num_parts) times the optimum. The
    last items are reserved for parts below it. Items are at least num_parts * at_least.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    spare = len(items) - num_parts * at_least

    def is_open(part: int, _: int) -> bool:
        return spare > 0 or len(parts[part]) < at_least

    for item, part in _cheapest(items, cost, num_parts, is_open):
        spare -= len(parts[part]) >= at_least
        parts[part].append(item)
    return parts


def pack_evenly(
    items: Sequence[int], cost: Sequence[float], size: Sequence[int], num_bins: int, capacity: int
) -> list[list[int]] | None:
    """Pack items into bins with nearly equal sums of cost, within capacity, no bin empty.

    Each to the cheapest bin with room. If that fails, best fit decreasing: largest first, each to
    the fullest bin with room. An item larger than the capacity gets its own bin. Items are at
    least one per bin; cost and size are by item.

    Returns:
        The bins, or None if both rules fail.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins

    def has_room(index: int, item: int) -> bool:
        return not bins[index] or room[index] >= size[item]

    for item, index in _cheapest(items, cost, num_bins, has_room):
        bins[index].append(item)
        room[index] -= size[item]
    return bins if sum(map(len, bins)) == len(items) else _best_fit(items, size, num_bins, capacity)


def _cheapest(
    items: Sequence[int], cost: Sequence[float], num_parts: int, is_open: Callable[[int, int], bool]
) -> Iterator[tuple[int, int]]:
    """Yield items, most expensive first, each with the cheapest part that is open to it.

    It ends at the first item to which no part is open: `is_open(part, item)`.

    Source: Graham 1969 (LPT)
    """
    heap = [(0.0, part) for part in range(num_parts)]
    for item in sorted(items, key=lambda i: (-cost[i], i)):
        closed = []
        while heap and not is_open(heap[0][1], item):
            closed.append(heapq.heappop(heap))
        if not heap:
            return
        total, part = heapq.heappop(heap)
        yield item, part
        for entry in [*closed, (total + cost[item], part)]:
            heapq.heappush(heap, entry)


def _best_fit(
    items: Sequence[int], size: Sequence[int], num_bins: int, capacity: int
) -> list[list[int]] | None:
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda i: (-size[i], i)):
        fitting = [index for index in range(len(bins)) if room[index] >= size[item]]
        if fitting:
            index = min(fitting, key=lambda i: room[i])
        elif len(bins) < num_bins:
            index = len(bins)
            bins.append([])
            room.append(capacity)
        else:
            return None
        bins[index].append(item)
        room[index] -= size[item]
    while len(bins) < num_bins:
        fullest = max(bins, key=len)
        bins.append([fullest.pop()])
    return bins
