"""Values that the phases of a step return, and the observers that get them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config.schema import RunConfig
from hybridrl.trainer.timing.timeline import Timeline

if TYPE_CHECKING:  # torch, before the checks of a run
    from hybridrl.data.batch import RolloutBatch
    from hybridrl.data.schedule import ScheduledBatch
    from hybridrl.data.sources.prompts import Prompt
    from hybridrl.trainer.rewarding import Rewarded

# Metrics by name; null where a step has no such number.
Row = dict[str, float | None]


@dataclass(frozen=True)
class Responses:
    """Responses with what they answer and what they earned.

    Attributes:
        prompts: [B] the prompt of each response.
        batch: [B] the responses.
        rewarded: [B] their texts and rewards.
    """

    prompts: "list[Prompt]"
    batch: "RolloutBatch"
    rewarded: "Rewarded"


@dataclass(frozen=True)
class Scored:
    """Result of the phase score; the scheduled batch has log-probs, values and scores."""

    responses: Responses
    scheduled: "ScheduledBatch"
    metrics: Row


@dataclass(frozen=True)
class Trained:
    """Training of a step.

    Attributes:
        batch: as it was trained on, with all fields.
        metrics: of all phases.
        responses: those of the batch; None in supervised fine-tuning.
    """

    batch: "RolloutBatch"
    metrics: Row
    responses: Responses | None = None


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the held-out problems.

    Attributes:
        accuracy: mean score, sampled at the training temperature.
        metrics: eval/..., see `Evaluator.evaluate`.
        responses: one response to each problem by kind: "sampled", perhaps "greedy".
    """

    accuracy: float
    metrics: Row
    responses: Mapping[str, Responses]


@dataclass(frozen=True)
class StepRecord:
    """Record of a finished step; step 0 is the evaluation before training.

    Attributes:
        metrics: of all phases, and what observers before this one have added.
        trained: None at step 0.
        timeline: phases of the driver and calls of the ranks.
        warnings: of the health checks.
    """

    step: int
    metrics: Row
    trained: Trained | None
    timeline: Timeline
    warnings: Sequence[str] = ()

    def adding(self, metrics: Mapping[str, float | None]) -> "StepRecord":
        """Return the record with more metrics."""
        return replace(self, metrics={**self.metrics, **metrics})


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        accuracy: held-out accuracy of the last evaluation, sampled at the training temperature;
            NaN without one.
        folder: directory of the run.
        step: last finished step.
        metrics: the step's row of metrics.jsonl.
    """

    accuracy: float
    folder: Path
    step: int
    metrics: Row = field(repr=False)


@dataclass(frozen=True)
class RolloutRecord:
    """Record of one response, with its reward before the KL penalty.

    `prompt` is what the model read before its first token, with the chat template; `question` is
    the problem without. The length includes the end token. `turns` are those of a conversation,
    {"role", "text"}; None without an environment. `images` are files below images/.
    """

    prompt_id: int
    prompt: str
    question: str
    response: str
    answer: str
    score: float
    length: int
    failure: str | None = None
    truncated: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    turns: list[dict[str, str]] | None = None
    weight_version: int = 0
    images: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return the fields, those of images if there are any."""
        fields = asdict(self)
        if not self.images:
            del fields["images"]
        return fields


@dataclass
class RunHandle:
    """Handle of a run in progress, for user code.

    Attributes:
        config: of the run.
        records: builds the records of responses.
        row: metrics of the last finished step, as in metrics.jsonl.
        batch: responses of the present or last step, with all fields; None before its update.
        is_stopped: the run ends after the present step.
    """

    config: RunConfig
    records: Callable[[Responses], list[RolloutRecord]]
    row: Row = field(default_factory=dict)
    batch: "RolloutBatch | None" = None
    is_stopped: bool = False
    _responses: Responses | None = None

    @property
    def samples(self) -> list[RolloutRecord]:
        """Texts and scores of the present or last step, in the order of `batch`."""
        return [] if self._responses is None else self.records(self._responses)

    def stop(self) -> None:
        """End the run after the present step, with a checkpoint."""
        self.is_stopped = True

    def publish(self, trained: Trained | None) -> None:
        """Show the training of a step; None: forget the last one."""
        self.batch = None if trained is None else trained.batch
        self._responses = None if trained is None else trained.responses

    def publish_responses(self, responses: Responses) -> None:
        """Show the responses of a step before its update."""
        self._responses = responses


class Observer:
    """Base class of what follows a run without changing it; override the methods that you need.

    Observers are called one after the other, in the order of `app/session.py`.
    """

    def scored(self, step: int, responses: Responses) -> None:
        """Called within a step, before its update."""

    def updated(self, step: int, trained: Trained) -> None:
        """Called within each step of trainer.samples_every_steps, after its update."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Called after an evaluation."""

    def after(self, record: StepRecord) -> StepRecord:
        """Called after a step; return the record, perhaps with more metrics or warnings."""
        return record

    def end(self, result: RunResult) -> None:
        """Called after the last step, when the model is saved."""


@dataclass(frozen=True)
class Observers(Observer):
    """All observers of a run as one; later ones see what earlier ones add to a record.

    Attributes:
        every_steps: trainer.samples_every_steps.
        section: times a phase (`Phases.section`).
    """

    observers: Sequence[Observer]
    every_steps: int
    section: Callable[[str], AbstractContextManager[None]]

    def scored(self, step: int, responses: Responses) -> None:
        """Pass the responses on."""
        for observer in self.observers:
            observer.scored(step, responses)

    def updated(self, step: int, trained: Trained) -> None:
        """Pass the training on if the step is due, as the phase record."""
        if not is_due(self.every_steps, step):
            return
        with self.section("record"):
            for observer in self.observers:
                observer.updated(step, trained)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Pass the evaluation on."""
        for observer in self.observers:
            observer.evaluated(step, evaluation)

    def after(self, record: StepRecord) -> StepRecord:
        """Pass the record from one to the next."""
        for observer in self.observers:
            record = observer.after(record)
        return record

    def end(self, result: RunResult) -> None:
        """Pass the result on."""
        for observer in self.observers:
            observer.end(result)


def is_due(every: int, step: int) -> bool:
    """Return true if something done every n steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
