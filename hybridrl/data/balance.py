"""Dealing items to parts of equal count and nearly equal cost."""

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
