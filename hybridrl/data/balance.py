"""Partition of items into parts of nearly equal cost, with bounds on counts or sizes."""

import heapq
from collections.abc import Callable, Iterator, Sequence


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
    items: Sequence[int],
    cost: Sequence[float],
    size: Sequence[int],
    num_bins: int,
    capacity: int,
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
    items: Sequence[int],
    cost: Sequence[float],
    num_parts: int,
    is_open: Callable[[int, int], bool],
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
