"""Problems of a config as data, their report, and ConfigError, which carries them to the user."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Limit for a value in a message.
MAX_SHOWN_CHARACTERS = 300
# Id of problems that other rooms give as texts.
TEXT = "text"


class Value(Enum):
    """Stands for the value of a problem that has none."""

    absent = "absent"


ABSENT = Value.absent


def shown(value: Any) -> str:
    """Return a value for messages, as in YAML; long texts truncated."""
    words = {"None": "null", "True": "true", "False": "false"}
    try:
        text = words.get(str(value), str(value))
    except ValueError:  # Python prints numbers of at most 4,300 digits
        return "a number of thousands of digits"
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[:MAX_SHOWN_CHARACTERS]}... ({len(text):,} characters)"


@dataclass(frozen=True)
class Problem:
    """Problem of a key, or of two that do not fit together.

    Attributes:
        id: names the check.
        key: dotted; or an override as typed, or a package.
        value: of the key; ABSENT if it has none, or the problem is the key itself.
        expected: follows "expected"; may be empty.
        why: the reason; may be empty.
        remedy: what to type; sentences without the last full stop; may be empty.
    """

    id: str
    key: str
    value: Any = ABSENT
    expected: str = ""
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        if self.id == TEXT:
            return self.why
        what = self.key if self.value is ABSENT else f"{self.key} = {shown(self.value)}"
        what += f", expected {self.expected}" if self.expected else ""
        what += f": {self.why}" if self.why else ""
        return "\n".join(
            f"{text}{'' if text[-1] in '.?' else '.'}" for text in (what, self.remedy) if text
        )


def must_be(id_: str, key: str, value: Any, needed: object, why: str, more: str = "") -> Problem:
    """Return the problem of a key that must have one value; `more` names other remedies."""
    return Problem(id_, key, value, str(needed), why, f"Set {key}={needed}{more}")


def as_problem(problem: Problem | str) -> Problem:
    """Return a problem; of a text "key = value, ..." or "key: ..." one with this key."""
    if isinstance(problem, Problem):
        return problem
    return Problem(TEXT, problem.partition(" ")[0].rstrip(":"), why=problem)


class ConfigError(ValueError):
    """Every problem of a config or command, in one report."""

    # Place of the problems, for the first line.
    subject = "in the config"

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__(*problems)
        self.problems = [as_problem(problem) for problem in problems]

    @property
    def texts(self) -> list[str]:
        """The problems' messages."""
        return [str(problem) for problem in self.problems]

    def __str__(self) -> str:
        count = len(self.problems)
        listed = "\n".join("- " + text.replace("\n", "\n  ") for text in self.texts)
        return f"{count} problem{'s' if count != 1 else ''} {self.subject}\n{listed}"


def raised_problems(check: Callable[..., object], *args: Any) -> list[Problem]:
    """Return the problems of the ConfigError that `check(*args)` raises; none if it passes."""
    try:
        check(*args)
    except ConfigError as error:
        return error.problems
    return []


@dataclass
class Report:
    """Problems found so far.

    Attributes:
        problems: in the order found.
        broken: dotted keys without a usable value; checks that need them are skipped.
    """

    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def add(self, problem: Problem | str, *, broken: str | None = None) -> None:
        """Add a problem, and mark the key that has no usable value because of it."""
        self.problems.append(as_problem(problem))
        if broken is not None:
            self.broken.add(broken)

    def usable(self, needs: Iterable[str]) -> bool:
        """Return whether every key or whole section of `needs` has a usable value."""
        return not any(
            f"{bad}.".startswith(f"{need}.") or f"{need}.".startswith(f"{bad}.")
            for need in needs
            for bad in self.broken
        )
