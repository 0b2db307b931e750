"""Calls of roles and their results, spans of their work, and times of the setup."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Shorter parts of the setup are not shown.
MIN_SHOWN_S = 0.05


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

    def note(self, per_rank: Sequence[Sequence[Span]], first: int = 0) -> None:
        """Add spans of consecutive ranks, beginning with rank `first`."""
        for rank, new in enumerate(per_rank, first):
            self._spans[rank].extend(new)

    def take(self) -> list[list[Span]]:
        """Return the spans since the last call, by rank."""
        taken, self._spans = self._spans, [[] for _ in self._spans]
        return taken


class SetupTimes:
    """Wall seconds of the consecutive parts of the setup since `began` (time.time())."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._last = began
        self.seconds: dict[str, float] = {}

    def mark(self, part: str, inside: Mapping[str, float] | None = None) -> None:
        """End a part that began at the last mark; subtract the seconds of parts `inside` it."""
        now = time.time()
        rest = now - self._last - sum((inside or {}).values())
        for name, seconds in {**(inside or {}), part: rest}.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return setup/<part>_s, and setup/total_s up to the last mark."""
        parts = {f"setup/{name}_s": seconds for name, seconds in self.seconds.items()}
        return parts | {"setup/total_s": self._last - self._began}

    def __str__(self) -> str:
        shown = [(name, s) for name, s in self.seconds.items() if s >= MIN_SHOWN_S]
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in shown)
        return f"{self._last - self._began:.1f} s: {parts}"


class RoleCall(NamedTuple):
    """Call of a role's method, "actor.update", run in every process.

    `args` and `kwargs` follow the rank's part of a batch, if any; `keep` returns the result of this
    process to the driver.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool


class TimedResult(NamedTuple):
    """Result of a call, and its span in one process or in the slowest."""

    value: Any
    span: Span
