"""Sampling order of training problems: deterministic infinite sequences.

    shares       index of the data set of each prompt
    shuffled     index of each problem within its data set

Neither depends on the number of prompts drawn at a time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count, repeat
from math import floor, gcd, lcm

# Share of the problems, the easiest, with which a curriculum begins.
START_SHARE = Fraction(1, 10)


def shuffled(
    passes: Iterable[Sequence[int]], distinct: int, admitted: Callable[[int], int]
) -> Iterator[int]:
    """Yield problems of one data set, epoch after epoch, each problem once per epoch.

    Problems follow the order of the epoch's permutation, among those admitted so far. An epoch ends
    when all admitted problems are drawn. At the start of an epoch, recently drawn problems are
    delayed, so that any `distinct` consecutive ones differ.

    Args:
        passes: infinite; permutations of 0..n-1, where 0 is the easiest problem.
        distinct: at most n.
        admitted: problems drawn so far -> number of the easiest problems that may be drawn;
            non-decreasing, at least `distinct`.
    """
    drawn = 0
    recent: deque[int] = deque(maxlen=distinct - 1)
    for order in passes:
        place = {problem: index for index, problem in enumerate(order)}
        held = deque(recent)
        barred = set(held)
        known = admitted(drawn)
        waiting = [place[problem] for problem in range(known) if problem not in barred]
        heapq.heapify(waiting)
        while waiting:
            problem = order[heapq.heappop(waiting)]
            yield problem
            drawn += 1
            recent.append(problem)
            if held:  # the oldest delayed problem is far enough back now
                heapq.heappush(waiting, place[held.popleft()])
            before, known = known, admitted(drawn)
            for newcomer in range(before, known):
                heapq.heappush(waiting, place[newcomer])


def shares(weights: Sequence[float]) -> Iterator[int]:
    """Yield indices of `weights` in proportion to the weights, as evenly spaced as possible.

    Let w be the k weights, normalised to sum 1, and c = 1 / (2 k - 2). After n draws, index i has
    been drawn x_i times with |x_i - n w_i| <= 1 - c < 1. Draw n selects the
    earliest deadline (1 - c - (n w_i - x_i)) / w_i of those with n w_i - x_i >= c.

    Args:
        weights: positive; decimal values are exact.

    Source: Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32, 323-330
    """
    parts = whole_weights(weights)
    if len(parts) == 1:
        yield from repeat(0)
    total, scale = sum(parts), 2 * len(parts) - 2
    drawn = [0] * len(parts)
    for n in count(1):
        # Scaled to integers: behind[i] = scale * total * (n w_i - x_i).
        behind = [scale * (n * part - total * x) for part, x in zip(parts, drawn, strict=True)]
        due = [index for index, amount in enumerate(behind) if amount >= total]
        chosen = min(due, key=lambda i: Fraction((scale - 1) * total - behind[i], parts[i]))
        drawn[chosen] += 1
        yield chosen


def most_drawn(weights: Sequence[float], index: int, draws: int) -> int:
    """Return the largest count of `index` in `draws` consecutive draws of `shares`."""
    parts = whole_weights(weights)
    if len(parts) == 1:
        return draws
    # Both ends of the window deviate from the exact share by at most half of this.
    slack = 2 * (1 - Fraction(1, 2 * len(parts) - 2))
    return min(draws, floor(Fraction(draws * parts[index], sum(parts)) + slack))


def pacing(size: int, distinct: int, length: Fraction) -> Callable[[int], int]:
    """Return the pacing function of a curriculum: problems drawn so far -> problems admitted.

    The admitted share grows linearly from START_SHARE to 1 over `length` draws, and is at least
    `distinct` problems. A length of 0 admits all problems at once.

    Source: the linear competence of Platanios et al. 2019, section 3,
    https://arxiv.org/abs/1903.09848
    """

    # In integers, as a run resumed late admits millions of times.
    (start, whole), (end, unit) = (part.as_integer_ratio() for part in (START_SHARE, length))

    def admitted(drawn: int) -> int:
        if drawn * unit >= end:
            return size
        share = start * end + (whole - start) * drawn * unit
        return max(distinct, share * size // (whole * end))

    return admitted


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in proportion to `weights`, read as exact decimals.

    Raises:
        ValueError: a weight is not positive, or not finite.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights must be positive numbers; got {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [weight // gcd(*whole) for weight in whole]
