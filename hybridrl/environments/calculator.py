"""Calculator: after `16 + 4 =` from the model, the environment writes ` 20` and a new line.

A turn without `=` at its end is the last one. The reward is GSM8K's, of the whole conversation.
Arithmetic is exact, on integers and decimals:

sum = product { (+ | -) product }     product = factor { (* | /) factor }
factor = [-] (number | ( sum ))
"""

import re
from decimal import Context, Decimal, Inexact, localcontext
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from hybridrl.environments.base import StepResult
from hybridrl.rewards import gsm8k
from hybridrl.rewards.base import answer_reader, checked_by

MARKER = "="
# Answer if nothing can be computed.
UNKNOWN = "?"

_TOKEN = re.compile(r" *([0-9]+(?:\.[0-9]+)?|[-+*/()])")
_SIGNS = str.maketrans("\u00d7\u00f7\u2013\u2212", "*/--", "$")
# At the start of the line, or after a word or one of <#:=.
_AT_END = re.compile(
    r"(?:^|(?<![\\\w'])[^\W\d_][^\W\d_']+[,:;]? |[<#:=])(?P<expression> *-?[(0-9][-+*/(). 0-9]*)$"
)
_OPERATORS = ({"+": add, "-": sub}, {"*": mul, "/": truediv})
_MAX_DIGITS = 4300  # as of Python's integers in texts
# Maximum nesting of brackets and signs, far below Python's recursion limit.
MAX_DEPTH = 50


@answer_reader
@checked_by(gsm8k.mode_problems)
class Calculator:
    """Environment that computes the model's expressions exactly.

    Args:
        example: row whose "answer" ends in `#### 42`, or is the number alone.
        mode: search for the final number, strict or flexible: see hybridrl.rewards.gsm8k.
    """

    def __init__(self, example: dict[str, Any], mode: str) -> None:
        self._answer = {"answer": example["answer"]}
        self._mode = gsm8k.Mode(mode)
        self._text = ""

    def reset(self) -> str:
        """Return "": the prompt is complete."""
        return ""

    def step(self, text: str) -> StepResult:
        """Return the value of the expression before the final `=`, or the final reward."""
        self._text += text
        expression, marker, behind = text.rpartition(MARKER)
        if not marker or behind.strip():
            reward = gsm8k.score("", self._text, self._answer, self._mode)
            return StepResult("", reward, True)
        answer = f" {_computed(expression)}\n"
        self._text += answer
        return StepResult(answer, 0.0, False)


def _computed(text: str) -> str:
    """Return the value of the expression at the end of the last line."""
    line = text.rpartition("\n")[2]
    try:
        return as_text(evaluate(expression_at_end(line)))
    except (ValueError, ZeroDivisionError):
        return UNKNOWN


def expression_at_end(text: str) -> str:
    """Return the numbers and signs at the end of a text, after the last word or sentence.

    "" if that would split a word, number or expression: "x2 + 3", "1,234 + 5", "2^3", "6 eggs - 3".
    """
    match = _AT_END.search(text.translate(_SIGNS).rpartition(". ")[2])
    return match["expression"].strip() if match else ""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression.

    Raises:
        ValueError: the text is not an expression, or is nested too deeply.
        ZeroDivisionError: division by 0.
    """
    tokens, place, expression = [], 0, expression.strip()
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"no number or sign: {expression[place:]!r}")
        tokens.append(match[1])
        place = match.end()
    rest = tokens[::-1]
    value = _value(rest, 0, 0)
    if rest:
        raise ValueError(f"unexpected {rest[-1]!r}")
    return value


def _value(rest: list[str], level: int, depth: int) -> Fraction:
    """Remove a sum (level 0), product (1) or factor (2) from the reversed tokens; return it."""
    if level == len(_OPERATORS):
        return _factor(rest, depth)
    value = _value(rest, level + 1, depth)
    while rest and rest[-1] in _OPERATORS[level]:
        operator = _OPERATORS[level][rest.pop()]
        value = operator(value, _value(rest, level + 1, depth))
    return value


def _factor(rest: list[str], depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    token = rest.pop() if rest else ""
    if token == "-":
        return -_factor(rest, depth + 1)
    if token == "(":
        value = _value(rest, 0, depth + 1)
        if not rest or rest.pop() != ")":
            raise ValueError("a bracket is not closed")
        return value
    if not token[:1].isdigit():
        raise ValueError(f"expected a number, found {token!r}")
    return Fraction(token)


def as_text(value: Fraction) -> str:
    """Format a number: 12, -0.25; as a fraction (7/3) if no decimal is exact."""
    with localcontext(Context(prec=_MAX_DIGITS, traps=[Inexact])):
        try:
            return f"{Decimal(value.numerator) / value.denominator:f}"
        except Inexact:
            return str(value)
