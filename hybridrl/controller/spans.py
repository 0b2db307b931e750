"""When the processes of a pool were at work."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple


class Span(NamedTuple):
    """One piece of work in one process.

    Attributes:
        name: "actor.update".
        start: seconds since the epoch, by the clock of the process's node.
        seconds: how long it took, the device's part of it included.
    """

    name: str
    start: float
    seconds: float


class Stopwatch:
    """Times a block: `span` is known when it has ended.

    Args:
        name: the span's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> "Stopwatch":
        self._start, self._ticks = time.time(), time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.span = Span(self._name, self._start, time.perf_counter() - self._ticks)


class SpanLog:
    """The spans of each rank since they were last taken.

    Args:
        num_ranks: processes of the pool.
    """

    def __init__(self, num_ranks: int) -> None:
        self._spans: list[list[Span]] = [[] for _ in range(num_ranks)]

    def note(self, per_rank: Sequence[Sequence[Span]]) -> None:
        """Add what each rank has done."""
        for spans, new in zip(self._spans, per_rank, strict=True):
            spans.extend(new)

    def take(self) -> list[list[Span]]:
        """What was noted since the last call, by rank."""
        taken, self._spans = self._spans, [[] for _ in self._spans]
        return taken


class PartTimes:
    """Wall seconds of the parts of something that happens once, in the order they began.

    Attributes:
        seconds: by the part's name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`."""
        with Stopwatch(name) as watch:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + watch.span.seconds
