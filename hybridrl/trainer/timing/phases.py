"""Wall time of each phase of a step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hybridrl.controller.calls import Span, Stopwatch
from hybridrl.trainer.timing.timeline import Section, Timeline


class Phases:
    """Wall seconds of a step's phases on the driver's clock, with the ranks' calls in them.

    Args:
        take_spans: returns the ranks' calls since the last time (`SpanLog.take`).
        on_enter: called with the name of each phase at its beginning.

    Attributes:
        timeline: the last whole step.
    """

    timeline: Timeline

    def __init__(
        self,
        take_spans: Callable[[], list[list[Span]]],
        on_enter: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._take_spans = take_spans
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}
        self._sections: list[Section] = []
        self._updated: dict[int, float] = {}
        self._switches: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole step; clear the phases of the step before."""
        self._seconds, self._sections = {}, []
        self._take_spans()  # of work between steps
        with Stopwatch("step") as watch:
            yield
        self.timeline = Timeline(watch.span, self._sections)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a phase; repetitions within a step are summed."""
        self._on_enter(name)
        with Stopwatch(name) as watch:
            yield
        self._sections.append(Section(watch.span, self._take_spans()))
        self._follow(self._sections[-1])
        self._seconds[name] = self.seconds(name) + watch.span.seconds

    @property
    def switch_s(self) -> float | None:
        """Seconds from a rank's last update to its sampling in the last section.

        Maximum over ranks, by their own clocks; None if no rank sampled there after an update.
        """
        return max(self._switches, default=None)

    def _follow(self, section: Section) -> None:
        self._switches = []
        for rank, spans in enumerate(section.ranks):
            for span in spans:
                method = span.name.rpartition(".")[2]
                if method == "update":
                    self._updated[rank] = span.start + span.seconds
                elif method == "generate" and rank in self._updated:
                    self._switches.append(span.start - self._updated.pop(rank))

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Count parts of a phase, timed elsewhere, as separate phases.

        Args:
            name: a finished phase; it keeps the rest.
            parts: seconds of each part, by its name.
        """
        for part, seconds in parts.items():
            self._seconds[part] = self.seconds(part) + seconds
        self._seconds[name] = max(0.0, self.seconds(name) - sum(parts.values()))

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase in this step so far; 0 if it has not run."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float | None]:
        """Compute time/<phase>_s, time/step_s and `Timeline.metrics` of the finished step."""
        metrics: dict[str, float | None] = {
            f"time/{name}_s": seconds for name, seconds in self._seconds.items()
        }
        metrics["time/step_s"] = self.timeline.step.seconds
        return metrics | self.timeline.metrics()
