"""Rewards for the format of a response, usually a part of reward=weighted."""

import re
from collections.abc import Iterator
from typing import Any

from hybridrl.rewards.base import checked_by
from hybridrl.rewards.gsm8k import strict_answer


def _pattern_problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check that the pattern is a regular expression."""
    pattern = args["pattern"]
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        yield f"{key}.args.pattern = {pattern!r} is no regular expression: {error}."


@checked_by(_pattern_problems)
def matches(prompt: str, response: str, example: dict[str, Any], pattern: str) -> float:
    r"""Return 1.0 if the whole response matches a regular expression, else 0.0.

    Nested repetitions such as (a+)+ can need exponential time; after reward.timeout_s the response
    counts as failed. Possessive forms, (a++)+, do not backtrack.

    Args:
        prompt, example: not read.
        response: text of the response.
        pattern: of Python's `re`; with (?s) at the beginning a dot also matches newlines.
    """
    return float(re.fullmatch(pattern, response) is not None)


def gsm8k_answer(prompt: str, response: str, example: dict[str, Any]) -> float:
    """Return 1.0 if the response ends in `#### <number>` (gsm8k.py), right or wrong, else 0.0."""
    return float(strict_answer(response) is not None)
