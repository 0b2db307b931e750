"""The order in which training draws its problems: pure sequences, made from the start.

    shares       which data set the next prompt comes from
    shuffled     which of a data set's problems comes next

Neither depends on how many prompts are asked for at a time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count, repeat
from math import floor, gcd, lcm

# A curriculum begins with this share of the problems, the easiest ones.
START_SHARE = Fraction(1, 10)


def shuffled(
    passes: Iterable[Sequence[int]], distinct: int, admitted: Callable[[int], int]
) -> Iterator[int]:
    """Problems of one data set, pass after pass; a pass holds each problem once.

    A problem is drawn in the order of its pass, but not before it is admitted; a pass in which
    nothing is left to draw ends, and those admitted later belong to it no more. Where two passes
    meet, problems drawn lately wait, so that any `distinct` consecutive ones differ.

    Args:
        passes: endless; permutations of 0..n-1, where 0 is the easiest problem.
        distinct: at most n.
        admitted: drawn so far -> how many of the easiest problems may be drawn; never falls, at
            least `distinct`.
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
            if held:  # the draw that kept the oldest of them out has gone by
                heapq.heappush(waiting, place[held.popleft()])
            for newcomer in range(known, admitted(drawn)):
                heapq.heappush(waiting, place[newcomer])
            known = max(known, admitted(drawn))


def shares(weights: Sequence[float]) -> Iterator[int]:
    """Endless indices of `weights`, each as often as its weight says, spread as evenly as can be.

    After n draws index i has come n w_i times (w normalised to sum 1), give or take at most
    1 - 1 / (2 k - 2) < 1 for k weights: the share rounded down or up, and exactly the share
    wherever that is whole. Draw n takes, of the indices that are behind by
    n w_i - x_i >= 1 / (2 k - 2), the one that would be too far behind first, which is the one with
    the smallest (1 - 1 / (2 k - 2) - (n w_i - x_i)) / w_i.

    Args:
        weights: positive; as decimals they are taken exactly.

    Source: Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32, 323-330
    """
    parts = whole_weights(weights)
    if len(parts) == 1:
        yield from repeat(0)
    total, scale = sum(parts), 2 * len(parts) - 2
    drawn = [0] * len(parts)
    for n in count(1):
        # Times total and scale, so that all is whole: behind[i] = scale * total * (n w_i - x_i).
        behind = [scale * (n * part - total * x) for part, x in zip(parts, drawn, strict=True)]
        due = [index for index, amount in enumerate(behind) if amount >= total]
        chosen = min(due, key=lambda i: Fraction((scale - 1) * total - behind[i], parts[i]))
        drawn[chosen] += 1
        yield chosen


def most_drawn(weights: Sequence[float], index: int, draws: int) -> int:
    """The most that `index` can come up in so many consecutive draws of `shares`."""
    parts = whole_weights(weights)
    if len(parts) == 1:
        return draws
    # What two counts from the start, each off by at most this, can be apart.
    slack = 2 * (1 - Fraction(1, 2 * len(parts) - 2))
    return min(draws, floor(Fraction(draws * parts[index], sum(parts)) + slack))


def pacing(size: int, distinct: int, length: Fraction) -> Callable[[int], int]:
    """Drawn so far -> how many of the easiest problems may be drawn; everything after `length`.

    Their share of all grows by the same amount with each draw, from START_SHARE to 1; they are
    at least `distinct`. A length of 0 admits everything at once.

    Source: the linear competence of Platanios et al. 2019, section 3,
    https://arxiv.org/abs/1903.09848
    """

    def admitted(drawn: int) -> int:
        if drawn >= length:
            return size
        share = START_SHARE + (1 - START_SHARE) * drawn / length
        return max(distinct, floor(share * size))

    return admitted


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions of `weights`, taken as the decimals they show.

    Raises:
        ValueError: a weight is not positive, or not finite.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights must be positive numbers; got {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [weight // gcd(*whole) for weight in whole]
