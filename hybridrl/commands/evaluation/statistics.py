"""What samples of problems say of a policy: mean score, pass@k, and how sure that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

from hybridrl.trainer.evaluate import half_width

# The group of all problems.
ALL = "all"


@dataclass(frozen=True)
class Estimate:
    """A mean over problems.

    Attributes:
        value: the mean.
        ci95: half the width of its 95 % confidence interval.
    """

    value: float
    ci95: float


@dataclass(frozen=True)
class GroupResult:
    """What one rule says of a group of problems.

    Attributes:
        problems: how many.
        score: mean score, over problems and samples; with one sample training's eval/accuracy.
        pass_at: k -> share of the problems that at least one of k samples solves.
    """

    problems: int
    score: Estimate
    pass_at: dict[int, Estimate]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c correct ones.

    1 - C(n - c, k) / C(n, k): without bias for the chance that k fresh samples hold a correct one,
    which 1 - (1 - c / n)^k is not.

    Args:
        n: samples of a problem.
        c: how many of them are correct, at most n.
        k: from 1 to n.

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
    """One rule's results on all problems, under the name `all`, and on each group of them.

    Args:
        scores: of each problem's samples.
        groups: indices of problems by name.
        ks: each at most the number of samples.
        correct_at: the score from which a sample is correct.
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
