"""GSM8K's reward: 1 if the response's final number equals the answer's, else 0.

A number has digits and, optionally, thousands commas, a decimal fraction, a sign and a currency
symbol: 42, -3, +7, 1,234.50, .5, $18, -$5. Numbers are compared exactly as decimals: 1.50 equals
1.5. A percent sign or other unit after the number is ignored: 50% equals 50. Fractions (3/4),
powers of ten (1e3) and number words are not recognised.

Source: Cobbe et al. 2021, https://arxiv.org/abs/2110.14168, for the `#### 42` format
"""

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from enum import StrEnum
from typing import Any

from hybridrl.rewards.base import answer_reader, checked_by, one_of, value_problems

MARKER = "####"
_CURRENCY = "$\u20ac\u00a3\u00a5"  # dollar, euro, pound, yen
# A minus after a digit, letter or bracket is not a sign ("10-3", "x-3").
_NUMBER = (
    rf"(?P<sign>(?<![\w.)])[-+\u2212])?[{_CURRENCY}]?(?P<sign2>(?<=[{_CURRENCY}])[-+\u2212])?"
    r"(?P<digits>(?:[0-9]{1,3}+(?![0-9])(?:,[0-9]{3}(?![0-9]))*+|[0-9]++)(?:\.[0-9]++)?"
    r"|(?<![0-9])\.[0-9]++)"
)
# At most three words ("square feet", "miles per hour"), with slashes and powers ("km/h", "m^2").
_WORD = r"[^\W\d_]++(?:[/^]\w++)*+"
_UNIT = rf"(?:[%{_CURRENCY}]|{_WORD}(?:[ ]{_WORD}){{0,2}}+)"
_ANY_NUMBER = re.compile(_NUMBER)
_POWER = re.compile(r"\^[-+]?[0-9.]++")
# Possessive throughout (*+, ++): time is linear in the response.
_FINAL_ANSWER = re.compile(rf"[ \t]*+{_NUMBER}(?:[ \t]*+{_UNIT})?+[ \t]*+\.?+\s*+")


class Mode(StrEnum):
    """Rule for the response's final answer: in its form alone, or whatever stands last."""

    strict = "strict"
    flexible = "flexible"


def mode_problems(key: str, args: dict[str, Any]) -> Iterator[str]:
    """Check the mode."""
    return value_problems(f"{key}.args", {"mode": Mode.strict} | args, {"mode": one_of(Mode)})


@answer_reader
@checked_by(mode_problems)
def score(prompt: str, response: str, example: dict[str, Any], mode: str = "strict") -> float:
    """Return 1.0 if the response's final number equals the example's answer, else 0.0.

    Args:
        prompt: not read.
        response: text of the response.
        example: its "answer" is a full solution that ends in `#### 42`, or the number alone.
        mode: strict: see `strict_answer`; flexible: see `last_number`.

    Raises:
        KeyError: the example has no "answer".
        ValueError: its answer holds no number, or there is no such mode.
    """
    expected = reference_answer(example["answer"])
    answer = strict_answer(response) if Mode(mode) is Mode.strict else last_number(response)
    return float(answer == expected)


def strict_answer(text: str) -> Decimal | None:
    """Return the number after the last `####` if the text ends with it, else None.

    A percent sign or a unit of at most three words may follow, and a period: "#### 42",
    "#### $1,234.50.", "####-3 km/h". "#### 42 or 43", "#### 42 = x", "#### **42**" and a sentence
    after the number give None.
    """
    _, marker, tail = text.rpartition(MARKER)
    match = _FINAL_ANSWER.fullmatch(tail) if marker else None
    return _decimal(match) if match else None


def last_number(text: str) -> Decimal | None:
    """Return the `strict_answer`, else the last number that is not a power; None without one."""
    if (answer := strict_answer(text)) is not None:
        return answer
    matches = deque(_ANY_NUMBER.finditer(_POWER.sub("", text)), maxlen=1)
    return _decimal(matches[0]) if matches else None


def reference_answer(answer: Any) -> Decimal:
    """Parse a data set's answer: a solution with `#### 42`, or the number alone.

    Raises:
        ValueError: it is neither.
    """
    text = str(answer)
    number = strict_answer(text if MARKER in text else MARKER + text)
    if number is None:
        raise ValueError(
            f"the example's answer is {text[-80:]!r}, expected a number or a solution that ends in "
            f"'{MARKER} <number>'; set data.answer_key to the column that holds it"
        )
    return number


def _decimal(match: re.Match[str]) -> Decimal:
    sign = match["sign"] or match["sign2"] or ""
    digits = match["digits"].replace(",", "")
    return Decimal(("-" if sign in ("-", "\u2212") else "") + digits)
