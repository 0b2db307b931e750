"""Rewards for the format of a response, usually a part of reward=weighted."""

import re
from collections.abc import Iterator
from typing import Any

from hybridrl.rewards.base import checked_by
from hybridrl.rewards.gsm8k import strict_answer


def _pattern_problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check that the pattern is a regular expression."""
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
    r"""Return 1.0 if the whole response matches a regular expression, else 0.0.

    Nested repetitions such as (a+)+ can need exponential time; after reward.timeout_s the response
    counts as failed. Possessive forms, (a++)+, do not backtrack.

    Args:
        prompt: not read.
        response: text of the response.
        example: not read.
        pattern: of Python's `re`; with (?s) at the beginning a dot also matches newlines.
    """
    return float(re.fullmatch(pattern, response) is not None)


def gsm8k_answer(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 1.0 if the response ends in `#### <number>`, right or wrong, else 0.0.

    hybridrl.rewards.gsm8k defines numbers.

    Args:
        prompt: not read.
        response: text of the response.
        example: not read.
    """
    return float(strict_answer(response) is not None)
