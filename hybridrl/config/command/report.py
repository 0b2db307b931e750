"""Report of a config's examination: problems, and keys without usable values."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Limit for a value in a message.
MAX_SHOWN_CHARACTERS = 300


def shown(value: Any) -> str:
    """Return a value for messages: null for None, long texts truncated."""
    try:
        text = "null" if value is None else str(value)
    except ValueError:  # Python prints numbers of at most 4,300 digits
        return "a number of thousands of digits"
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}... ({len(text):,} characters)"


@dataclass
class Report:
    """Problems found so far.

    Attributes:
        problems: one text each, in the order found.
        broken: dotted keys without a usable value; checks that need them are skipped.
    """

    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def add(self, problem: str, *, broken: str | None = None) -> None:
        """Add a problem, and mark the key that has no usable value because of it."""
        self.problems.append(problem)
        if broken is not None:
            self.broken.add(broken)

    def usable(self, needs: Iterable[str]) -> bool:
        """Return whether every key or whole section of `needs` has a usable value."""
        return not any(
            bad == need or bad.startswith(f"{need}.") or need.startswith(f"{bad}.")
            for need in needs
            for bad in self.broken
        )
