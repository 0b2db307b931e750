"""Guard against non-finite updates: stops the run and saves the update's batch for a replay.

batch.safetensors   the responses with all inputs of the update's forward passes and losses
batch.json          step, role, schedule, config without secrets, decoded texts
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.untrusted_code import untrusted_code
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import Epochs, ScheduledBatch
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.record import Observer, StepRecord
from hybridrl.trainer.tracking.best_effort_files import replace_file, replace_text
from hybridrl.trainer.tracking.provenance import plain

WEIGHTS_FOLDER = "weights"
ROLES = ("actor", "critic")
REPLAY_FOLDER = "replay"
TENSORS_FILE, FACTS_FILE = "batch.safetensors", "batch.json"
FORMAT = 1
PROMPT_LENGTHS, RESPONSE_LENGTHS = "lengths.prompts", "lengths.responses"


@dataclass
class SkippedSteps:
    """Optimizer steps skipped in a row, over training steps and resumes.

    Attributes:
        count: by role.
        since: by role, the training step of the first; only of roles with skipped steps.
    """

    count: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)

    def note(self, step: int, metrics: Mapping[str, float | None], num_steps: int) -> None:
        """Count the skipped steps of an update with `num_steps` optimizer steps of each role."""
        for role in ROLES:
            if f"{role}/skipped_last" not in metrics:  # the role was not trained
                continue
            last = int(metrics[f"{role}/skipped_last"] or 0)
            if last < num_steps:  # an earlier one was not skipped
                self.count[role] = 0
            if last and not self.count.get(role):
                self.since[role] = step
            self.count[role] = self.count.get(role, 0) + last
            if not self.count[role]:
                self.since.pop(role, None)


class NonFiniteGuard(Observer):
    """Guard against skipped updates; it holds each step's batch until `after`.

    `skipped` is part of the loop's state. `save_weights` writes the workers' state into a folder.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, save_weights: Callable[[Path], object]
    ) -> None:
        self.skipped = SkippedSteps()
        self._config = config
        self._run_dir = run_dir
        self._save_weights = save_weights
        self._met: tuple[int, ScheduledBatch, float] | None = None

    def note(
        self,
        step: int,
        scheduled: ScheduledBatch,
        kl_coef: float,
        metrics: Mapping[str, float | None],
    ) -> None:
        """Record an update: its batch, the weight of the KL penalty in its loss, its metrics."""
        self._met = (step, scheduled, kl_coef)
        self.skipped.note(step, metrics, sum(map(len, scheduled.ranks[0])))

    def after(self, record: StepRecord) -> StepRecord:
        """Stop the run if too many steps in a row were skipped.

        Raises:
            RunStopped: trainer.max_skipped_steps was reached; batch and weights are saved.
        """
        limit = self._config.trainer.max_skipped_steps
        for role, count in self.skipped.count.items():
            if count >= limit:
                raise RunStopped(
                    f"The last {count} optimizer steps of the {role} were skipped, all since "
                    f"training step {self.skipped.since[role]}: their loss or gradient was not "
                    f"finite (trainer.max_skipped_steps = {limit}).\n{self._keep(role)}"
                )
        self._met = None
        return record

    def _keep(self, role: str) -> str:
        """Save the inputs of a replay; return a message with their place."""
        assert self._met is not None
        step, scheduled, kl_coef = self._met
        folder = self._run_dir / REPLAY_FOLDER / f"step_{step}"
        kept = ReplayBatch(role, step, kl_coef, scheduled.batch, scheduled.ranks, self._config)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
            write_replay(folder, kept)
            # Still the weights of the skipped mini-batches: no step was taken since.
            self._save_weights(folder / WEIGHTS_FOLDER)
        except (OSError, SafetensorError) as error:
            return f"The batch could not be saved in {folder}: {error}"
        names_code = any(untrusted_code(plain(self._config)))
        return (
            f"The batch and the weights of that update are in {folder}.\n"
            f"To find the responses that cause it: hybridrl replay {folder}"
            f"{' --run-code' if names_code else ''}"
        )


class ReplayBatch(NamedTuple):
    """Update of an actor or critic that was not finite.

    Attributes:
        kl_coef: weight of the KL penalty in the loss.
        batch: the responses with all fields of the update.
        ranks: for each rank, indices into `batch` by epoch, mini-batch and micro-batch.
    """

    role: str
    step: int
    kl_coef: float
    batch: RolloutBatch
    ranks: list[Epochs]
    config: RunConfig


class Texts(NamedTuple):
    """Decoded prompt and response, special tokens left out."""

    group_id: int
    prompt: str
    response: str


def write_replay(folder: Path, replay: ReplayBatch) -> None:
    """Write both files into a new `folder`.

    Raises:
        OSError, SafetensorError: the write failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batch = replay.batch
    tensors = {PROMPT_LENGTHS: batch.prompts.lengths, RESPONSE_LENGTHS: batch.responses.lengths}
    for name, value in batch.tensors().items():
        if name in ("teacher", "teacher_prompts"):  # a replay has no teachers
            continue
        tensors[name] = value.values if isinstance(value, Ragged) else value
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    replace_file(folder / TENSORS_FILE, lambda new: save_file(tensors, new))
    facts = {
        "format": FORMAT,
        "role": replay.role,
        "step": replay.step,
        "kl_coef": replay.kl_coef,
        "config": plain(replay.config),
        "ranks": replay.ranks,
        "images": batch.images is not None,
        "texts": [text._asdict() for text in texts_of(replay)],
    }
    replace_text(folder / FACTS_FILE, json.dumps(facts) + "\n")


def texts_of(replay: ReplayBatch) -> list[Texts]:
    """Decode prompts and responses."""
    decode, batch = decoder(load_tokenizer(replay.config.model)), replay.batch
    prompts = decode(row.tolist() for row in batch.prompts.rows())
    responses = decode(row.tolist() for row in batch.responses.rows())
    rows = zip(batch.group_id.tolist(), prompts, responses, strict=True)
    return [Texts(*row) for row in rows]
