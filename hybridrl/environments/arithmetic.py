"""Exact arithmetic on integers and decimals: + - * / and brackets.

sum = product { (+ | -) product }     product = factor { (* | /) factor }
factor = [-] (number | ( sum ))
"""

import re
from fractions import Fraction

_TOKEN = re.compile(r" *([0-9]+(?:\.[0-9]+)?|[-+*/()])")
_CHARACTERS = "0123456789.+-*/() "
# Maximum nesting of brackets and signs, far below Python's recursion limit.
MAX_DEPTH = 50


def expression_at_end(text: str) -> str:
    """Return the numbers and signs at the end of a text, after the last word or sentence.

    "" if that would split a word or number: "x2 + 3", "1,234 + 5".
    """
    before = text.rstrip(_CHARACTERS)
    tail = text[len(before) :]
    if tail[:1].isdigit() and (before[-1:].isalnum() or before.endswith(",")):
        return ""
    return tail.rpartition(". ")[2].strip()


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
    reader = _Reader(tokens)
    value = reader.sum(0)
    if reader.rest:
        raise ValueError(f"unexpected {reader.rest[-1]!r}")
    return value


def as_text(value: Fraction) -> str:
    """Format a number: 12, -0.25; as a fraction (7/3) if no decimal is exact."""
    twos, fives, rest = 0, 0, value.denominator
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    digits = max(twos, fives)
    if rest > 1 or digits == 0:
        return str(value)
    scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{scaled[:-digits]}.{scaled[-digits:]}"


class _Reader:
    """Recursive descent parser of the grammar above; `rest` has the unread tokens, reversed."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens[::-1]

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._next() in ("+", "-"):
            sign, other = self.rest.pop(), self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self._next() in ("*", "/"):
            sign, other = self.rest.pop(), self._factor(depth)
            value = value * other if sign == "*" else value / other
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        token = self.rest.pop() if self.rest else ""
        if token == "-":
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._next() != ")":
                raise ValueError("a bracket is not closed")
            self.rest.pop()
            return value
        if not token[:1].isdigit():
            raise ValueError(f"expected a number, found {token!r}")
        return Fraction(token)

    def _next(self) -> str:
        return self.rest[-1] if self.rest else ""
