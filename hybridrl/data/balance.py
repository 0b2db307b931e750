"""Partition of items into parts of nearly equal cost, with bounds on counts or sizes."""

import heapq
from collections.abc import Sequence


def balance(items: Sequence[int], cost: Sequence[float], num_parts: int) -> list[list[int]]:
    """Partition items into parts of equal count (to 1) with nearly equal sums of `cost[item]`.

    Greedy, most expensive item first, each to the cheapest part with room.

    Source: Graham 1969 (LPT), with a bound on counts
    """
    counts = [len(items) // num_parts + (p < len(items) % num_parts) for p in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts) if counts[part]]
    for item in sorted(items, key=lambda i: (-cost[i], i)):
        total, part = heapq.heappop(heap)
        parts[part].append(item)
        if len(parts[part]) < counts[part]:
            heapq.heappush(heap, (total + cost[item], part))
    return parts


def balance_totals(
    items: Sequence[int], cost: Sequence[float], num_parts: int, at_least: int
) -> list[list[int]]:
    """Partition items into parts of nearly equal sums of `cost[item]`, with a minimum count.

    Greedy, most expensive item first, each to the cheapest part. The largest sum is at most
    4/3 - 1 / (3 num_parts) times the optimum. The last items are reserved for parts below the
    minimum count.

    Args:
        items: at least num_parts * at_least.
        cost: by item, > 0.
        num_parts: number of parts.
        at_least: minimum number of items of a part.

    Source: Graham 1969 (LPT)
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    lacking = num_parts * at_least
    for assigned, item in enumerate(sorted(items, key=lambda i: (-cost[i], i))):
        reserved = len(items) - assigned == lacking
        part = min(
            (p for p in range(num_parts) if not reserved or len(parts[p]) < at_least),
            key=lambda p: totals[p],
        )
        lacking -= len(parts[part]) < at_least
        parts[part].append(item)
        totals[part] += cost[item]
    return parts


def pack_evenly(
    items: Sequence[int],
    cost: Sequence[float],
    size: Sequence[int],
    num_bins: int,
    capacity: int,
) -> list[list[int]] | None:
    """Pack items into bins with nearly equal sums of cost, within capacity, no bin empty.

    Most expensive first, each to the cheapest bin with room (Graham 1969). If that fails, best fit
    decreasing: largest first, each to the fullest bin with room. An item larger than the capacity
    gets its own bin.

    Args:
        items: at least one per bin.
        cost: by item, > 0.
        size: by item.
        num_bins: number of bins.
        capacity: of each bin, in the unit of size.

    Returns:
        The bins, or None if both rules fail.
    """
    return _cheapest_bin(items, cost, size, num_bins, capacity) or _best_fit(
        items, size, num_bins, capacity
    )


def _cheapest_bin(
    items: Sequence[int],
    cost: Sequence[float],
    size: Sequence[int],
    num_bins: int,
    capacity: int,
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for item in sorted(items, key=lambda i: (-cost[i], i)):
        too_full = []
        while heap and bins[heap[0][1]] and room[heap[0][1]] < size[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        total, index = heapq.heappop(heap)
        bins[index].append(item)
        room[index] -= size[item]
        for entry in [*too_full, (total + cost[item], index)]:
            heapq.heappush(heap, entry)
    return bins


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
