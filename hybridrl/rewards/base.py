"""What a reward is, and how one is found by its dotted path."""

import functools
import importlib.util
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import locate

# No reward is larger. In float32, squares of such numbers still add up over a step.
MAX_REWARD = 1e12

# prompt, response, example: what a reward judges.
RewardItem = tuple[str, str, dict[str, Any]]


class Score(NamedTuple):
    """A score and what it was made of.

    Attributes:
        total: what the response is trained on; finite.
        parts: numbers whose means become the metrics reward/part_<name>; a name is one word.
    """

    total: float
    parts: dict[str, float]


class Reward(Protocol):
    """Judges one response.

    It runs in processes of its own, so it may be slow, block or crash; it must not rely on state
    shared with other calls.

    Args:
        prompt: the text that the model was given.
        response: the text that it wrote, without special tokens.
        example: the row of the data set; its "answer" is the column named by data.answer_key.
        args: conf/reward's args.

    Returns:
        A number of at most MAX_REWARD in size, or a Score that also tells its parts; larger is
        better.
    """

    def __call__(
        self, prompt: str, response: str, example: dict[str, Any], /, **args: Any
    ) -> float | Score:
        """The response's score."""
        ...


class CheckedReward:
    """A reward with checks that run before the run does (config.user_code.classes.ChecksItself).

    Args:
        function: the reward.
        problems: (key, args) -> what is wrong with the args, or missing on this machine.
    """

    def __init__(
        self,
        function: Callable[..., float | Score],
        problems: Callable[[str, dict[str, Any]], Iterable[str]],
    ) -> None:
        functools.update_wrapper(self, function)  # inspect.signature sees the function's
        self._function = function
        self._problems = problems

    def __call__(
        self, prompt: str, response: str, example: dict[str, Any], /, **args: Any
    ) -> float | Score:
        """The response's score."""
        return self._function(prompt, response, example, **args)

    def problems(self, key: str, args: dict[str, Any]) -> Iterable[str]:
        """What is wrong with `args`, or missing on this machine."""
        return self._problems(key, args)


def checked_by(
    problems: Callable[[str, dict[str, Any]], Iterable[str]],
) -> Callable[[Callable[..., float | Score]], CheckedReward]:
    """A decorator that gives a reward function checks: `problems(key, args)` -> texts."""
    return lambda function: CheckedReward(function, problems)


def package_problems(key: str, module: str, distribution: str) -> Iterator[str]:
    """Whether a package that the reward of section `key` needs is not installed."""
    if importlib.util.find_spec(module) is None:
        yield (
            f"{key}.function needs the package {distribution}, which is not installed.\n"
            f"Run pip install {distribution}, or choose another reward."
        )


def as_score(value: Any, function: str) -> Score:
    """What a reward returned, as a Score.

    Args:
        value: a real number (a bool is one, a str is not), numpy's and torch's among them, or a
            Score.
        function: its dotted path, for messages.

    Raises:
        TypeError: it is neither.
        ValueError: a number is NaN, infinite or too large, or a part's name is no word.
    """
    if not isinstance(value, Score):
        return Score(finite_number(value, function), {})
    for name in value.parts:
        if not re.fullmatch(r"\w+", name):
            raise ValueError(f"{function} named a part {name!r}, expected one word")
    parts = {
        name: finite_number(part, f"{function}, {name},") for name, part in value.parts.items()
    }
    return Score(finite_number(value.total, function), parts)


def read_score(value: Any, function: str) -> Score:
    """The Score that JSON has made a list of.

    Raises:
        TypeError, ValueError: it has made that of something else.
    """
    match value:
        case [total, dict() as parts]:
            return as_score(Score(total, parts), function)
    raise ValueError("no score")


@runtime_checkable
class _Scalar(Protocol):
    """A number of numpy or torch."""

    def item(self) -> Any:
        """It as a number of Python; raises if there are several."""
        ...


def finite_number(value: Any, function: str) -> float:
    """A reward that `function`, for messages, has returned; raises as `as_score` does."""
    number = value.item() if isinstance(value, _Scalar) else value
    if not isinstance(number, numbers.Real):
        raise TypeError(f"{function} returned a {type(value).__name__}, expected a number")
    if not math.isfinite(number):
        raise ValueError(f"{function} returned {value}, expected a finite number")
    if abs(float(number)) > MAX_REWARD:
        raise ValueError(f"{function} returned {value}, expected at most {MAX_REWARD:g} in size")
    return float(number)


def reward_task(function: str, args: dict[str, Any]) -> Callable[[RewardItem], Score]:
    """What a reward process computes: the score of each (prompt, response, example).

    Raises:
        ConfigError: there is no such function.
    """
    reward = resolve_function(function)
    return lambda item: as_score(reward(*item, **args), function)


def resolve_function(dotted: str) -> Reward:
    """The reward that `dotted` ("package.module.name") names.

    Raises:
        ConfigError: as `locate_anywhere`, or what it names is not callable.
    """
    function = locate_anywhere("reward.function", dotted)
    if not callable(function):
        raise ConfigError(
            f"reward.function = {dotted} is a {type(function).__name__}, expected a function "
            f"(prompt, response, example, **args) -> float."
        )
    return function


def locate_anywhere(key: str, dotted: str) -> Any:
    """What the value `dotted` ("package.module.name") of a config key names.

    Modules are looked for where Python looks, then in the current directory, which a console
    script would not search; it is appended to sys.path, so it hides nothing.

    Raises:
        ConfigError: there is no such module, it cannot be imported, or it has no such name.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return locate(key, dotted)
