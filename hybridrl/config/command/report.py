"""What is collected while a config is examined: problems, and the keys that cannot be used."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Of a value in a message, which a user has to find again.
MAX_SHOWN_CHARACTERS = 300


def shown(value: Any) -> str:
    """A value as messages have it: null for None, and the beginning of what is long."""
    try:
        text = "null" if value is None else str(value)
    except ValueError:  # Python writes numbers of at most 4,300 digits
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
        """Note a problem, and the key that it leaves without a usable value."""
        self.problems.append(problem)
        if broken is not None:
            self.broken.add(broken)

    def usable(self, needs: Iterable[str]) -> bool:
        """Whether every key (or whole section) of `needs` has a value."""
        return not any(
            bad == need or bad.startswith(f"{need}.") or need.startswith(f"{bad}.")
            for need in needs
            for bad in self.broken
        )
