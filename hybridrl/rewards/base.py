"""Interface of rewards, and checks of their arguments and scores."""

import math
import numbers
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from hybridrl.config.errors import Problem
from hybridrl.config.keys import unknown_sibling

# Limit of |reward|: sums of squares over a step stay finite in float32.
MAX_REWARD = 1e12

# prompt, response, example and, for TRL functions, the response's token ids
RewardItem = tuple[str, str, dict[str, Any]] | tuple[str, str, dict[str, Any], list[int]]


class WrongScore(ValueError):
    """A reward returned something else than a score."""


class Score(NamedTuple):
    """Score of a response and its parts.

    Attributes:
        total: the reward; finite.
        parts: numbers whose means become the metrics reward/part_<name>; a name is one word.
    """

    total: float
    parts: dict[str, float]


# Reward of one response, (prompt, response, example, **args) -> its score; larger is better.
#
# prompt is the text that the model reads, response its text without special tokens; example is a
# copy of the row of the data set, whose "answer" is the column named by data.answer_key, if any;
# args are reward.args of the config. The score is a number of at most MAX_REWARD in size, or a
# Score with parts. A reward runs in separate processes, so it may be slow, block or crash. It must
# not rely on state shared between calls. It may be async. calls.py also calls functions for verl
# and TRL.
Reward = Callable[..., float | Score | Awaitable[float | Score]]

Checked = TypeVar("Checked", bound=Callable[..., Any])

# (key of the section with function and args, args) -> messages on wrong arguments or missing
# requirements of this machine
Problems = Callable[[str, dict[str, Any]], Iterable[Problem | str]]


def checked_by(problems: Problems) -> Callable[[Checked], Checked]:
    """Return a decorator of a function whose args are checked before a run (`ChecksItself`)."""

    def decorate(function: Checked) -> Checked:
        function.problems = problems  # type: ignore[attr-defined]
        return function

    return decorate


def answer_reader(function: Checked) -> Checked:
    """Mark a function that reads example["answer"] with any args (`ReadsAnswer`)."""
    function.reads_answer = lambda args: True  # type: ignore[attr-defined]
    return function


# What is expected of a value, in words; and whether a value is so.
Rule = tuple[str, Callable[[Any], bool]]


def is_number(value: Any) -> bool:
    """Return whether a value of YAML is a finite number."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -math.inf < value < math.inf


def at_least(least: int) -> Rule:
    """Return the rule of an integer."""
    expected = f"an integer of at least {least}"
    return expected, lambda v: is_number(v) and isinstance(v, int) and v >= least


def one_of(choices: type[StrEnum]) -> Rule:
    """Return the rule of a choice."""
    return f"one of {', '.join(choices)}", lambda value: value in list(choices)


SECONDS: Rule = ("seconds above 0", lambda value: is_number(value) and value > 0)


def value_problems(where: str, values: dict[str, Any], rules: Mapping[str, Rule]) -> Iterator[str]:
    """Yield a message for each key with a rule that is missing or has another value."""
    for name, (expected, fits) in rules.items():
        key = f"{where}.{name}"
        if name not in values:
            yield f"{key} is missing. Set +{key}=<{expected}>."
        elif not fits(values[name]):
            yield f"{key} = {values[name]}, expected {expected}."


def section_problems(where: str, section: Any, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Yield the problems of a value that should be a section of just the keys with rules."""
    if not isinstance(section, dict):
        yield f"{where} = {section}, expected a section with {', '.join(rules)}."
        return
    for name in section.keys() - rules.keys():
        yield unknown_sibling(f"{where}.{name}", section[name], rules)
    yield from value_problems(where, section, rules)


def as_score(value: Any, function: str) -> Score:
    """Convert the value of a reward to a Score.

    Args:
        value: a Score, or a real number: Python's (including bool), numpy's or torch's.
        function: dotted path of the reward, for messages.

    Raises:
        WrongScore: the value is neither, a number is NaN, infinite or too large, or a part's name
            is not one word.
    """
    if not isinstance(value, Score):
        return Score(finite_number(value, function), {})
    for name in value.parts:
        if not re.fullmatch(r"\w+", name):
            raise WrongScore(f"{function} named a part {name!r}, expected one word")
    parts = {
        name: finite_number(part, f"{function}, {name},") for name, part in value.parts.items()
    }
    return Score(finite_number(value.total, function), parts)


def read_score(value: Any, function: str) -> Score:
    """Convert a list [total, parts], as decoded from JSON, to a Score; raise as `as_score` does."""
    match value:
        case [total, dict() as parts]:
            return as_score(Score(total, parts), function)
    raise ValueError("no score")


@runtime_checkable
class _Scalar(Protocol):
    def item(self) -> Any: ...  # of numpy and torch


def finite_number(value: Any, function: str) -> float:
    """Convert one number that `function` returned; raise as `as_score` does."""
    number = value
    if isinstance(value, _Scalar):
        with suppress(ValueError, RuntimeError):  # several elements
            number = value.item()
    if not isinstance(number, numbers.Real):
        raise WrongScore(f"{function} returned a {type(value).__name__}, expected a number")
    if not math.isfinite(number):
        raise WrongScore(f"{function} returned {value}, expected a finite number")
    if abs(float(number)) > MAX_REWARD:
        raise WrongScore(f"{function} returned {value}, expected at most {MAX_REWARD:g} in size")
    return float(number)
