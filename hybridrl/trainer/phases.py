"""How long each phase of a step takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Wall seconds of a step's phases, on the driver's clock.

    Args:
        on_enter: told the name of each phase as it begins; for what the user sees.
    """

    def __init__(self, on_enter: Callable[[str], None] = lambda name: None) -> None:
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}
        self._step_seconds = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step; phases of the step before are forgotten."""
        self._seconds = {}
        start = time.perf_counter()
        try:
            yield
        finally:
            self._step_seconds = time.perf_counter() - start

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a phase; one that comes twice in a step counts together."""
        self._on_enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self.seconds(name) + time.perf_counter() - start

    def seconds(self, name: str) -> float:
        """Seconds of a phase in this step so far; 0 where it has not run."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float | None]:
        """time/<phase>_s of each phase of the step, and time/step_s."""
        metrics: dict[str, float | None] = {
            f"time/{name}_s": seconds for name, seconds in self._seconds.items()
        }
        metrics["time/step_s"] = self._step_seconds
        return metrics
