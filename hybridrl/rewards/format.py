"""Rewards for the form of a response, whatever it says; mostly one part of several."""

import re
from collections.abc import Iterator
from typing import Any

from hybridrl.rewards.base import checked_by
from hybridrl.rewards.gsm8k import strict_answer


def _pattern_problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Whether the pattern is a regular expression."""
    pattern = args["pattern"]
    where = f"{key}.args.pattern = {pattern!r}"
    if not isinstance(pattern, str):
        yield f"{where}, expected a regular expression as text."
        return
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"{where} is no regular expression: {error}."


@checked_by(_pattern_problems)
def matches(prompt: str, response: str, example: dict[str, Any], pattern: str) -> float:
    r"""1.0 if the whole response matches a regular expression, else 0.0.

    Nested repetitions such as (a+)+ can take time exponential in the response; reward.timeout_s
    then ends them, and the response counts as failed. Possessive forms, (a++)+, do not backtrack.

    Args:
        prompt: not looked at.
        response: what the model wrote.
        example: not looked at.
        pattern: of Python's `re`; let it begin with (?s) for a dot that also matches line ends.
    """
    return float(re.fullmatch(pattern, response) is not None)


def gsm8k_answer(prompt: str, response: str, example: dict[str, Any]) -> float:
    """1.0 if the response ends in `#### <number>`, right or wrong, else 0.0.

    What counts as a number is told in hybridrl.rewards.gsm8k.

    Args:
        prompt: not looked at.
        response: what the model wrote.
        example: not looked at.
    """
    return float(strict_answer(response) is not None)
