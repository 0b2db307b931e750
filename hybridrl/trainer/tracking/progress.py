"""Observer that writes and prints the metrics of each step, and the summary."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridrl.config.changes import may_grow
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.untrusted_code import needs_trust
from hybridrl.trainer.record import Observer, RunResult, StepRecord, is_due
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.provenance import plain
from hybridrl.trainer.tracking.tracker import Tracker


@dataclass(frozen=True)
class Progress(Observer):
    """Metrics of steps on disk, in trackers and on the console.

    Attributes:
        file_failures: describes records that could not be written.
        lost_checkpoints: their number.
    """

    config: RunConfig
    console: RunConsole
    tracker: Tracker
    file_failures: Callable[[], list[str]]
    lost_checkpoints: Callable[[], int]

    def after(self, record: StepRecord) -> StepRecord:
        """Store and print the step's metrics and warnings; the metrics become a row."""
        row = self.tracker.log(record.step, record.metrics)
        self.console.step(row)
        for warning in record.warnings:
            self.console.warn(warning)
        if record.step and is_due(self.config.trainer.samples_every_steps, record.step):
            self.tracker.log_timeline(record.timeline.record(record.step))
        return replace(record, metrics=row)

    def end(self, result: RunResult) -> None:
        """Print the summary."""
        for failure in [*self.tracker.failures(), *self.file_failures()]:
            self.console.warn(failure)
        config = plain(self.config)
        self.console.summary(
            self.tracker.rows,
            self.lost_checkpoints(),
            result.folder,
            needs_trust=needs_trust(config),
            may_grow=may_grow(config),
            epochs=self.config.trainer.epochs,
            has_report=self.config.tracking.report,
        )
