"""Dealing items to parts of nearly equal cost, with bounds on counts or sizes."""

import heapq
from collections.abc import Sequence


def balance(items: Sequence[int], cost: Sequence[float], num_parts: int) -> list[list[int]]:
    """Deal items to parts of equal count with nearly equal sums of `cost[item]`.

    Longest first, each to the cheapest part that still has room (the greedy rule of Graham 1969
    with a bound on counts; counts differ by at most one when they do not divide).
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
    """Deal items to parts of nearly equal sums of `cost[item]` and at least `at_least` items each.

    Longest first, each to the cheapest part: the largest sum is at most 4/3 - 1 / (3 num_parts) of
    the best possible one (Graham 1969). Once as many items are left as parts still lack, only
    these take any.

    Args:
        items: what to deal, at least num_parts * at_least.
        cost: by item, > 0.
        num_parts: how many parts.
        at_least: items of each part.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [0.0] * num_parts
    lacking = num_parts * at_least
    for dealt, item in enumerate(sorted(items, key=lambda i: (-cost[i], i))):
        reserved = len(items) - dealt == lacking
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
    """Deal items to bins with nearly equal sums of cost, each within its capacity and none empty.

    Most expensive first, each to the cheapest bin with room (Graham 1969); if that runs out of
    room, largest first, each to the fullest bin that still takes it (best fit decreasing). An item
    larger than the capacity takes a bin of its own.

    Args:
        items: what to deal, at least one per bin.
        cost: by item, > 0.
        size: by item.
        num_bins: how many bins.
        capacity: of each bin, in the unit of size.

    Returns:
        The bins, or None if neither rule found a way.
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
