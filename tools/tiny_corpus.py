"""Solutions of mixed quality: what the tiny model is warm-started on.

A model trained on them finds the right form and number in a part of its samples only, so
reinforcement learning has something to sharpen:

    right      the solution as it should be, `#### <number>` last
    wrong      as well formed, with a wrong number: a slip in a step, or another number at the end
    unmarked   the right steps, and no marker
    rambling   the right steps, no marker, and then on and on: the last number is seldom the answer
"""

import random
import re
from collections.abc import Iterator
from enum import StrEnum

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.problems import Problem, train_problem


class Quality(StrEnum):
    """Kinds of solutions."""

    right = "right"
    wrong = "wrong"
    unmarked = "unmarked"
    rambling = "rambling"


SHARES = {
    Quality.right: 0.33,
    Quality.wrong: 0.16,
    Quality.unmarked: 0.17,
    Quality.rambling: 0.34,
}
_SLIPS = (-10, -2, -1, 1, 2, 10)
_RAMBLES = ("Then", "But", "So maybe", "Or", "Wait,")


def corpus(seed: int, start: int, count: int) -> Iterator[tuple[str, str]]:
    """(question, solution) of training problems `start` to `start + count`, in mixed quality."""
    for index in range(start, start + count):
        rng = random.Random(derive_seed(seed, "solution", index))
        problem = train_problem(seed, index)
        (quality,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
        yield problem.question, solution(problem, quality, rng)


def solution(problem: Problem, quality: Quality, rng: random.Random) -> str:
    """A solution of `problem` of the given quality."""
    steps, answer = problem.answer.rsplit("\n#### ", 1)
    if quality is Quality.right:
        return problem.answer
    if quality is Quality.wrong:
        spoil = rng.choice([_with_slip, _with_other_number])
        return spoil(steps, rng)
    if quality is Quality.unmarked:
        return f"{steps}\nThe answer is {answer}." if rng.random() < 0.5 else steps
    return f"{steps}\n{_ramble(int(answer), rng)}"


def _with_slip(steps: str, rng: random.Random) -> str:
    """The steps with the last result slightly off, and that number behind the marker."""
    expression, result = steps.rsplit(" ", 1)
    slipped = rng.choice([int(result) + d for d in _SLIPS if int(result) + d > 0])
    return f"{expression} {slipped}\n#### {slipped}"


def _with_other_number(steps: str, rng: random.Random) -> str:
    """The right steps, and behind the marker a number of the last step that is not its result."""
    *others, result = re.findall(r"\d+", steps.rsplit("\n", 1)[-1])
    wrong = [number for number in others if number != result]
    return f"{steps}\n#### {rng.choice(wrong)}"


def _ramble(number: int, rng: random.Random) -> str:
    """Further steps that nobody asked for, true as sums but leading away from the answer."""
    lines = []
    for _ in range(rng.randint(1, 3)):
        other = rng.randint(2, 19)
        add = number <= other or rng.random() < 0.5
        following = number + other if add else number - other
        lines.append(f"{rng.choice(_RAMBLES)} {number} {'+-'[not add]} {other} = {following}")
        number = following
    return "\n".join(lines)
