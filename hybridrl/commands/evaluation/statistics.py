"""Statistics of samples: mean score and pass@k, with confidence intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from hybridrl.trainer.evaluate import half_width

# Name of the group of all problems.
ALL = "all"


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and half the width of its 95 % confidence interval."""

    value: float
    ci95: float


@dataclass(frozen=True)
class GroupResult:
    """Results of one rule on a group of problems.

    The score is the mean over problems and samples: with one sample eval/accuracy of training.
    `pass_at` maps k to the share of the problems solved by at least one of k samples.
    """

    problems: int
    score: Estimate
    pass_at: dict[int, Estimate]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples include at least one of c correct ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k; 1 - (1 - c / n)^k is biased.

    Raises:
        ValueError: a number is out of range.

    Source: Chen et al. 2021, section 2.1, equation 1, https://arxiv.org/abs/2107.03374
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass_at_k needs 1 <= k <= n and 0 <= c <= n; got {n=}, {c=}, {k=}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def group_results(
    scores: Sequence[Sequence[float]],
    groups: Mapping[str, Sequence[int]],
    ks: Sequence[int],
    correct_at: float,
) -> dict[str, GroupResult]:
    """Return one rule's results on all problems (`all`) and on each group of indices.

    A sample is correct from the score `correct_at` on.
    """
    everyone = {ALL: range(len(scores))}
    return {
        name: _result([scores[index] for index in members], ks, correct_at)
        for name, members in (everyone | dict(groups)).items()
    }


def _result(scores: Sequence[Sequence[float]], ks: Sequence[int], correct_at: float) -> GroupResult:
    counts = [(len(of_one), sum(s >= correct_at for s in of_one)) for of_one in scores]
    return GroupResult(
        problems=len(scores),
        score=_estimate([fmean(of_one) for of_one in scores]),
        pass_at={k: _estimate([pass_at_k(n, c, k) for n, c in counts]) for k in ks},
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), half_width(values))
