"""Base of config sections, and annotations of their fields.

Annotations are the range of a number, FREE for keys that a resume may change, CHOSEN for those that
may be null, and Shared. They stand in `typing.Annotated` at the field itself (schema.py); typed.py
reads them.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.config.errors import Problem

# Counts and sizes are multiplied with each other, and torch and vLLM hold them in 64 bits.
LARGEST_COUNT = 2**48
# Three weeks: the system counts the milliseconds of a wait in 31 bits.
LONGEST_S = 1_814_400


class Unusable(Exception):
    """A value was read that has a problem; the problem is in the report."""


@dataclass(frozen=True)
class NoValue:
    """Stands in a field whose value has a problem."""

    key: str


class Section:
    """Base of config sections. Reading a field that holds a NoValue raises Unusable."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            if type(value) is NoValue:
                raise Unusable(value.key)
            return value


def value_at(config: Section, key: str) -> Any:
    """Return the value of a dotted key; raises Unusable if it has none."""
    return attrgetter(key)(config)


def set_value(config: Section, key: str, value: Any) -> None:
    """Set the value of a dotted key of a section."""
    section, _, name = key.rpartition(".")
    setattr(value_at(config, section), name, value)


def is_null(config: Section, key: str) -> bool:
    """Return whether a key is null; false if it has no usable value."""
    with suppress(Unusable):
        return value_at(config, key) is None
    return False


class Shared(NamedTuple):
    """A field that is no key of its own: it has the value of another key.

    Attributes:
        key: dotted, of the other one.
        why: the reason.
        is_linked: true if it stands in YAML, too, as the link to the other one.
    """

    key: str
    why: str
    is_linked: bool = False


# A field without effect, up to rounding, on what a resumed run computes.
FREE = object()
# A field that may be null before a value is chosen for the model or the GPUs' memory (derive.py).
CHOSEN = object()


class Range(NamedTuple):
    """Range of a number, or of each number of a list.

    Attributes:
        why: the reason, for the message.
        low, high: the bounds.
        low_open, high_open: true excludes the bound itself.
    """

    why: str
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

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

    def problem(self, key: str, value: Any) -> Problem | None:
        """Return the problem of a key's number or list of numbers; None if all are in range."""
        numbers = value if isinstance(value, list) else [value]
        if all(self.contains(number) for number in numbers):
            return None
        expected = f"each {self}" if isinstance(value, list) else str(self)
        if max(numbers) > self.high == LARGEST_COUNT:
            expected = f"{expected} and at most {LARGEST_COUNT:g}"
        return Problem("range", key, value, expected, self.why)


# Ranges to be called with the reason: of counts, numbers and times.
at_least_one = partial(Range, low=1, high=LARGEST_COUNT)
at_least_zero = partial(Range, low=0, high=LARGEST_COUNT)
above_zero = partial(Range, low=0, low_open=True)
share = partial(Range, low=0, high=1)
seconds = partial(Range, low=0, high=LONGEST_S, low_open=True)

SEED = Range("random generators accept seeds of 63 bits", 0, 2**63 - 1)
BETWEEN_0_AND_1 = share("it is a share", low_open=True, high_open=True)
ANY = Range("")
