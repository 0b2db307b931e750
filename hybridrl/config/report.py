"""What is collected while a config is examined: problems, and the keys that cannot be used."""

from collections.abc import Iterable
from dataclasses import dataclass, field


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
