"""Base of config sections, and annotations of their fields.

Annotations are the range of a number, and FREE for keys that a resume may change. They stand in
`typing.Annotated` at the field itself (schema.py); typed.py checks ranges.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.config.command.report import shown

# Counts and sizes are multiplied with each other, and torch and vLLM hold them in 64 bits.
LARGEST_COUNT = 2**48
# Three weeks: the system counts the milliseconds of a wait in 31 bits.
LONGEST_S = 1_814_400


class Unusable(AttributeError):
    """A value was read that has a problem; the problem is in the report."""


class Section:
    """Base of config sections; one with problems lacks the attributes that have no usable value."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise Unusable(f"{type(self).__name__}.{name}")


# A field without effect, up to rounding, on what a resumed run computes.
FREE = object()


class Range(NamedTuple):
    """Range of a number, or of each number of a list.

    Attributes:
        low, high: the bounds.
        low_open, high_open: true excludes the bound itself.
        why: the reason, for the message.
    """

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    why: str = ""

    def contains(self, value: float) -> bool:
        """Return whether `value` lies within; infinities and NaN do not."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and -math.inf < value < math.inf

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a number neither infinite nor NaN"
        low = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        if self.high in (LARGEST_COUNT, math.inf):
            return low
        return f"{low} and {'below' if self.high_open else 'at most'} {self.high:g}"

    def problem(self, key: str, value: Any) -> str | None:
        """Return the problem of a key's number or list of numbers; None if all are in range."""
        numbers = value if isinstance(value, list) else [value]
        if all(self.contains(number) for number in numbers):
            return None
        expected = f"each {self}" if isinstance(value, list) else str(self)
        if max(numbers) > self.high == LARGEST_COUNT:
            expected = f"{expected} and at most {LARGEST_COUNT:g}"
        return f"{key} = {shown(value)}, expected {expected}: {self.why}."


def at_least_one(why: str) -> Range:
    """Return the range of a count that must not be 0."""
    return Range(1, high=LARGEST_COUNT, why=why)


def at_least_zero(why: str) -> Range:
    """Return the range of a count that may be 0."""
    return Range(0, high=LARGEST_COUNT, why=why)


def above_zero(why: str) -> Range:
    """Return the range of a positive number."""
    return Range(0, low_open=True, why=why)


def share(why: str, *, low_open: bool = False) -> Range:
    """Return the range of a number from 0 to 1."""
    return Range(0, high=1, low_open=low_open, why=why)


def seconds(why: str) -> Range:
    """Return the range of a timeout."""
    return Range(0, high=LONGEST_S, low_open=True, why=f"{why}; the longest wait is 3 weeks")


SEED = Range(0, high=2**63 - 1, why="random generators accept seeds of 63 bits")
TEMPERATURE = above_zero("logits are divided by it")
BETWEEN_0_AND_1 = Range(0, 1, low_open=True, high_open=True, why="it is a share")
ANY = Range(-math.inf)
