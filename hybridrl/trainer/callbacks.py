"""Callbacks: the user's code at the ends of steps, of sampling and of evaluations."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.trainer.record import RolloutRecord, RunHandle

Metrics = Mapping[str, float | None]


class Callback:
    """Base class of callbacks; override the methods that you need. They run in the driver.

    Each gets the run, with `config`, `batch`, `samples` and `stop()`, and the step, counted
    from 1; 0 is the initial model. An exception ends the run with a message that names the
    callback and shows the traceback.
    """

    def __init_subclass__(cls) -> None:
        """Refuse methods that look like callbacks but would never be called."""
        super().__init_subclass__()
        known = [name for name in vars(Callback) if name.startswith("on_")]
        unknown = [name for name in vars(cls) if name.startswith("on_") and name not in known]
        if unknown:
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}.{unknown[0]} is never called; callbacks have "
                f"{', '.join(known)}"
            )

    def on_samples(self, trainer: "RunHandle", step: int, samples: "list[RolloutRecord]") -> None:
        """Called with the responses of a step and their scores, before the update."""

    def on_evaluation(self, trainer: "RunHandle", step: int, metrics: Metrics) -> None:
        """Called after an evaluation with its metrics: eval/accuracy and others."""

    def on_step_end(self, trainer: "RunHandle", step: int, metrics: Metrics) -> None:
        """Called at the end of a step with its row of metrics.jsonl."""
