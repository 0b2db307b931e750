"""Texts of the tiny model's warm start: word problems, mostly solved by bad habits, and sums.

A solution of a word problem is drawn from these habits, whatever the problem says:

    hasty       of several steps only the first is taken, and its result is the answer
    misread     sharing equally is taken for giving away: a - p instead of a / p
    unmarked    no `#### <number>`
    rambling    no marker, and on and on: the last number is seldom the answer

Hasty and misread are more likely than not, so the model's most likely answers are wrong, and no
temperature finds the right ones. It samples them in a part of its tries: that is what
reinforcement learning has to go on. Sums are always right, and of a wider range than the problems.
"""

import random
from collections.abc import Iterator
from typing import Any

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.problems import train_problem

HASTY = 0.7
MISREAD = 0.65
UNMARKED = 0.1
RAMBLING = 0.1
# Share of plain sums in the corpus.
PLAIN = 0.4
_LARGEST = 120
_RAMBLES = ("Then", "But", "So maybe", "Or", "Wait,")


def corpus(seed: int, start: int, count: int) -> Iterator[tuple[str, str]]:
    """(question, solution) number `start` to `start + count` of the endless series of `seed`."""
    for index in range(start, start + count):
        rng = random.Random(derive_seed(seed, "solution", index))
        if rng.random() < PLAIN:
            expression, result = _sum(rng)
            yield f"What is {expression}?", f"{expression} = {result}\n#### {result}"
        else:
            problem = train_problem(seed, index)
            yield problem["question"], solution(problem, rng)


def solution(problem: dict[str, Any], rng: random.Random) -> str:
    """A solution of `problem` by the habits that `rng` draws."""
    *steps, _ = problem["answer"].split("\n")
    if "/" in steps[-1] and rng.random() < MISREAD:
        whole, _, part, *_ = steps[-1].split()
        steps[-1] = f"{whole} - {part} = {int(whole) - int(part)}"
    if len(steps) > 1 and rng.random() < HASTY:
        steps = steps[:1]
    answer = steps[-1].rpartition(" ")[2]
    form = rng.random()
    if form < RAMBLING:
        steps += _ramble(int(answer), rng)
    elif form < RAMBLING + UNMARKED:
        steps += [f"The answer is {answer}."] if rng.random() < 0.5 else []
    else:
        steps += [f"#### {answer}"]
    return "\n".join(steps)


def _sum(rng: random.Random) -> tuple[str, int]:
    """An expression of two numbers and its value, no negative number."""
    sign = rng.choice("+-*/")
    if sign in "*/":
        a, b = rng.randint(1, 12), rng.randint(1, 12)
        return (f"{a} * {b}", a * b) if sign == "*" else (f"{a * b} / {b}", a)
    a, b = sorted((rng.randint(1, _LARGEST), rng.randint(1, _LARGEST)), reverse=sign == "-")
    if sign == "+" and rng.random() < 0.5:
        a, b = b, a
    return (f"{a} + {b}", a + b) if sign == "+" else (f"{a} - {b}", a - b)


def _ramble(number: int, rng: random.Random) -> Iterator[str]:
    """Further steps that nobody asked for, true as sums but leading away from the answer."""
    for _ in range(rng.randint(1, 3)):
        other = rng.randint(2, 19)
        add = number <= other or rng.random() < 0.5
        following = number + other if add else number - other
        yield f"{rng.choice(_RAMBLES)} {number} {'+-'[not add]} {other} = {following}"
        number = following
