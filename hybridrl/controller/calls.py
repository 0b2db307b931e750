"""Calls of roles and their results, with spans: names, start times and durations of work."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Span of work in one process.

    Attributes:
        name: "actor.update".
        start: seconds since the epoch, by the clock of the process's node.
        seconds: duration, device work included.
    """

    name: str
    start: float
    seconds: float


class Stopwatch:
    """Context manager that times its block as a span of this name; `span` exists afterwards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> "Stopwatch":
        self._start, self._ticks = time.time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.span = Span(self._name, self._start, time.perf_counter() - self._ticks)


class SpanLog:
    """Spans of each of the ranks since the last `take`."""

    def __init__(self, num_ranks: int) -> None:
        self._spans: list[list[Span]] = [[] for _ in range(num_ranks)]

    def note(self, per_rank: Sequence[Sequence[Span]]) -> None:
        """Add spans of each rank."""
        for spans, new in zip(self._spans, per_rank, strict=True):
            spans.extend(new)

    def take(self) -> list[list[Span]]:
        """Return the spans since the last call, by rank."""
        taken, self._spans = self._spans, [[] for _ in self._spans]
        return taken


class PartTimes:
    """Wall seconds of the parts of a one-time operation, in the order of their starts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to part `name`."""
        with Stopwatch(name) as watch:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + watch.span.seconds


class RoleCall(NamedTuple):
    """Call of a role's method, run in every process.

    `args` and `kwargs` follow the rank's part of a batch, if any; `keep` returns the result of this
    process to the driver.
    """

    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool

    @property
    def name(self) -> str:
        """Name in messages: "actor.update"."""
        return f"{self.role}.{self.method}"


class TimedResult(NamedTuple):
    """Result of a call, and its span in one process or in the slowest."""

    value: Any
    span: Span
