"""ConfigError, the exception for errors that the user can fix."""

from collections.abc import Callable
from typing import Any


class ConfigError(ValueError):
    """Every problem of a config or command, in one report.

    Args:
        problems: one text each: "key = value, expected ...: reason", then a line with the remedy.
    """

    # Place of the problems, for the first line.
    subject = "in the config"

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        count = len(self.problems)
        listed = "\n".join("- " + problem.replace("\n", "\n  ") for problem in self.problems)
        return f"{count} problem{'s' if count != 1 else ''} {self.subject}\n{listed}"


def raised_problems(check: Callable[..., object], *args: Any) -> list[str]:
    """Return the problems of the ConfigError that `check(*args)` raises; none if it passes."""
    try:
        check(*args)
    except ConfigError as error:
        return error.problems
    return []
