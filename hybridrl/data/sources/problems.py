"""Embedded data set: rows with word problems in GSM8K's format, generated from a seed.

    question   a template of word_problems.txt with random names, things and numbers
    answer     its solution, one step a line, with `#### <number>` as the last line
    steps      1 to 3
    tags       "template" (its name), "steps", "range" ("seen" or "unseen")

Preference data also has the columns of `pair` or `labelled`.

The hash of a question assigns it to the training or held-out split, so no question is in both. Some
held-out problems have a number from a range without training questions, tag "range" = "unseen".
"""

import hashlib
import itertools
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from hybridrl.data.seeds import derive_seed

NUM_TRAIN = 8192
NUM_HELD_OUT = 320
NUM_HELD_OUT_UNSEEN = 64

# Slots a, b, c of a template are counts; p, q, r, s are factors and group sizes.
COUNTS = (*range(2, 21), *range(26, 37))
UNSEEN_COUNTS = range(21, 26)
FACTORS = range(2, 10)
# Of a result of a rejected solution; 0: it ends there.
ERRORS = (-10, -2, -1, 1, 2, 10, 0, 0, 0, 0)

NAMES = ("Tom", "Ann", "Sam", "Mia", "Leo", "Eva", "Max", "Zoe", "Ben", "Lily")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "marbles")

_OPERATORS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_COUNT_SLOTS = ("a", "b", "c")
_FACTOR_SLOTS = ("p", "q", "r", "s")


@dataclass(frozen=True)
class _Template:
    """Question with slots, and its solution steps; x and y are earlier results."""

    question: str
    steps: tuple[str, ...]

    def slots(self, kind: tuple[str, ...]) -> list[str]:
        """Return the slots of one kind in the question."""
        return [slot for slot in kind if f"{{{slot}}}" in self.question]


def _templates() -> dict[str, _Template]:
    """Read word_problems.txt: name | solution steps | question."""
    text = Path(__file__).with_name("word_problems.txt").read_text(encoding="ascii")
    rows = (line.split(" | ") for line in text.splitlines())
    return {name: _Template(question, tuple(steps.split(", "))) for name, steps, question in rows}


TEMPLATES = _templates()


def train_problem(seed: int, index: int) -> dict[str, Any]:
    """Return training problem `index` of the infinite series of `seed`."""
    rng = random.Random(derive_seed(seed, "train_problem", index))
    while True:
        problem = _draw(rng, unseen=False)
        if not is_held_out(problem["question"]):
            return problem


def train_problems(count: int = NUM_TRAIN, seed: int = 0) -> list[dict[str, Any]]:
    """Return the first `count` distinct training problems of the series of `seed`."""
    distinct: dict[str, dict[str, Any]] = {}
    series = (train_problem(seed, index) for index in itertools.count())
    while len(distinct) < count:
        problem = next(series)
        distinct.setdefault(problem["question"], problem)
    return list(distinct.values())


def held_out_problems() -> list[dict[str, Any]]:
    """Return the held-out problems, the same in every run; every fifth has an unseen range."""
    rng = random.Random(derive_seed("held_out_problems"))
    distinct: dict[str, dict[str, Any]] = {}
    every = NUM_HELD_OUT // NUM_HELD_OUT_UNSEEN
    while len(distinct) < NUM_HELD_OUT:
        problem = _draw(rng, unseen=len(distinct) % every == every - 1)
        if is_held_out(problem["question"]):
            distinct.setdefault(problem["question"], problem)
    return list(distinct.values())


def pair(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Return a problem's solution and a wrong one as columns chosen and rejected.

    The wrong one has a wrong result in a random step, from which later ones follow, or ends too
    early; its answer is wrong.
    """
    right, rng = problem["answer"], random.Random(derive_seed("wrong", problem["question"]))
    *steps, answer = right.split("\n")
    wrong = None
    while wrong is None or wrong.endswith(f"\n{answer}"):
        wrong = _solve_wrongly(steps, rng.randrange(len(steps)), rng.choice(ERRORS))
    return {"chosen": right, "rejected": wrong}


def labelled(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Return either solution of `pair` as column chosen, with its label, true for the right one."""
    label = derive_seed("label", problem["question"]) % 2 == 0
    return {"chosen": pair(problem)["chosen" if label else "rejected"], "label": label}


def _solve_wrongly(steps: list[str], wrong: int, error: int) -> str | None:
    """Return the solution with an `error` in step `wrong`, where it ends if that is 0.

    None if a result is not a positive integer.
    """
    changed, lines, result = dict[str, str](), list[str](), Fraction()
    for index, step in enumerate(steps if error else steps[: wrong + 1]):
        left, sign, right, _, before = step.split()
        left, right = changed.get(left, left), changed.get(right, right)
        result = _OPERATORS[sign](Fraction(left), Fraction(right)) + error * (index == wrong)
        if result < 1 or result.denominator != 1:
            return None
        lines.append(f"{left} {sign} {right} = {result}")
        if index >= wrong:
            changed[before] = str(result)
    return "\n".join([*lines, f"#### {result}"])


def is_held_out(question: str) -> bool:
    """Return true for the tenth of questions whose hash assigns them to the held-out split."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 10 == 0


def _draw(rng: random.Random, *, unseen: bool) -> dict[str, Any]:
    """Draw a problem in which every step gives a positive integer."""
    name = rng.choice([n for n, t in TEMPLATES.items() if not unseen or t.slots(_COUNT_SLOTS)])
    template = TEMPLATES[name]
    solved = None
    while solved is None:
        numbers = _draw_numbers(rng, template, unseen)
        solved = _solve(template.steps, numbers)
    person, friend = rng.sample(NAMES, 2)
    words = {"name": person, "friend": friend, "things": rng.choice(THINGS)}
    steps, kind = len(template.steps), "unseen" if unseen else "seen"
    return {
        "question": template.question.format(**words, **numbers),
        "answer": solved,
        "steps": steps,
        "tags": {"template": name, "steps": str(steps), "range": kind},
    }


def _draw_numbers(rng: random.Random, template: _Template, unseen: bool) -> dict[str, int]:
    """Draw a number for each slot; with `unseen`, one count is from the unseen range."""
    counts = template.slots(_COUNT_SLOTS)
    numbers = {slot: rng.choice(COUNTS) for slot in counts}
    numbers |= {slot: rng.choice(FACTORS) for slot in template.slots(_FACTOR_SLOTS)}
    if unseen:
        numbers[rng.choice(counts)] = rng.choice(UNSEEN_COUNTS)
    return numbers


def _solve(steps: tuple[str, ...], numbers: Mapping[str, int]) -> str | None:
    """Return the solution, or None if a step does not give a positive integer."""
    known = {slot: Fraction(number) for slot, number in numbers.items()}
    lines, result = [], Fraction()
    for step, result_slot in zip(steps, "xyz", strict=False):
        left, sign, right = step.split()
        result = _OPERATORS[sign](known[left], known[right])
        if result < 1 or result.denominator != 1:
            return None
        lines.append(f"{known[left]} {sign} {known[right]} = {result}")
        known[result_slot] = result
    return "\n".join([*lines, f"#### {result}"])
