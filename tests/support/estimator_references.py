"""Every advantage estimator in plain Python, written from its docstring's formula.

A response is the list of rewards on its mask; a result has one advantage per such token.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

GROUP_EPS = 1e-6
WHITEN_EPS = 1e-8

Rows = list[list[float]]


class Case(NamedTuple):
    """A ragged batch: token rewards on the mask, group and greedy outcome of each response."""

    rows: Rows
    group: Sequence[int]
    greedy: Sequence[float]
    gamma: float
    lam: float
    pass_k: int

    @property
    def outcomes(self) -> list[float]:
        return [math.fsum(row) for row in self.rows]

    def others(self, b: int) -> list[int]:
        """The members of b's group, b among them."""
        return [j for j, name in enumerate(self.group) if name == self.group[b]]

    @property
    def values(self) -> Rows:
        """A critic's estimates: no two alike, and larger where the greedy outcome is."""
        return [
            [b * number for number in range(1, len(row) + 1)]
            for b, row in zip(self.greedy, self.rows, strict=True)
        ]

    def spread(self, advantages: Sequence[float]) -> Rows:
        return [[a] * len(row) for a, row in zip(advantages, self.rows, strict=True)]


def whitened(rows: Rows) -> Rows:
    tokens = [a for row in rows for a in row]
    mean, variance = statistics.fmean(tokens), statistics.pvariance(tokens)
    return [[(a - mean) / math.sqrt(variance + WHITEN_EPS) for a in row] for row in rows]


def gae(case: Case) -> Rows:
    """As a sum over the later deltas, not by recursion."""

    def one(rewards: list[float], values: list[float]) -> list[float]:
        following = [*values[1:], 0.0]
        delta = [
            r + case.gamma * after - v
            for r, v, after in zip(rewards, values, following, strict=True)
        ]
        return [
            math.fsum((case.gamma * case.lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
            for t in range(len(delta))
        ]

    return [one(r, v) for r, v in zip(case.rows, case.values, strict=True)]


def grpo(case: Case) -> Rows:
    def one(b: int) -> float:
        group = [case.outcomes[j] for j in case.others(b)]
        difference = case.outcomes[b] - statistics.fmean(group)
        return difference / (statistics.stdev(group) + GROUP_EPS)

    return case.spread([one(b) for b in range(len(case.rows))])


def less_group_mean(case: Case) -> list[float]:
    return [
        case.outcomes[b] - statistics.fmean(case.outcomes[j] for j in case.others(b))
        for b in range(len(case.rows))
    ]


def dr_grpo(case: Case) -> Rows:
    return case.spread(less_group_mean(case))


def rloo(case: Case) -> Rows:
    return case.spread(
        [
            case.outcomes[b] - statistics.fmean(case.outcomes[j] for j in case.others(b) if j != b)
            for b in range(len(case.rows))
        ]
    )


def opo(case: Case) -> Rows:
    def baseline(b: int) -> float:
        members = case.others(b)
        lengths = [len(case.rows[j]) for j in members]
        weighted = [n * case.outcomes[j] for n, j in zip(lengths, members, strict=True)]
        return math.fsum(weighted) / sum(lengths)

    # Where a group has no token at all, no token needs a value.
    advantages = [r - baseline(b) if case.rows[b] else 0.0 for b, r in enumerate(case.outcomes)]
    return case.spread(advantages)


def reinforce_plus_plus(case: Case) -> Rows:
    return whitened(
        [
            [
                math.fsum(case.gamma ** (k - t) * row[k] for k in range(t, len(row)))
                for t in range(len(row))
            ]
            for row in case.rows
        ]
    )


def reinforce_plus_plus_baseline(case: Case) -> Rows:
    return whitened(case.spread(less_group_mean(case)))


def remax(case: Case) -> Rows:
    return case.spread([r - b for r, b in zip(case.outcomes, case.greedy, strict=True)])


def pass_at_k(case: Case) -> Rows:
    """By listing all sets."""

    def one(b: int) -> float:
        sets = list(itertools.combinations(case.others(b), case.pass_k))
        best = [max(case.outcomes[j] for j in chosen) for chosen in sets]
        holding = [r for r, chosen in zip(best, sets, strict=True) if b in chosen]
        difference = statistics.fmean(holding) - statistics.fmean(best)
        return difference / (statistics.pstdev(best) + GROUP_EPS)

    return case.spread([one(b) for b in range(len(case.rows))])


REFERENCES: dict[str, Callable[[Case], Rows]] = {
    function.__name__: function
    for function in (
        gae,
        grpo,
        dr_grpo,
        rloo,
        opo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        pass_at_k,
    )
}
