"""Observer that writes rollouts, tokens and experts of some steps (docs/records.md)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from hybridrl.config.command.secrets import secret_values
from hybridrl.config.estimators import trains_policy
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.record import (
    Evaluation,
    Observer,
    Responses,
    RolloutRecord,
    StepRecord,
    Trained,
    is_due,
)
from hybridrl.trainer.tracking.best_effort_files import BestEffortFiles
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.rollout_log import (
    conversations,
    pick_samples,
    rollout_records,
    samples_text,
    write_evaluation,
    write_experts,
    write_rollouts,
    write_thumbnails,
)
from hybridrl.trainer.tracking.token_log import clipped, pick_rows, token_table, write_tokens
from hybridrl.trainer.tracking.tracker import Tracker
from hybridrl.trainer.updates import Updates


class RecordBuilder:
    """Builder of the records of responses, with the turns of conversations.

    `decode` leaves special tokens out, `decode_all` shows them.
    """

    def __init__(self, config: RunConfig, decode: Decode, decode_all: Decode) -> None:
        self._config = config
        self._secrets = {*secret_values(asdict(config))}
        self._decode, self._decode_all = decode, decode_all

    def __call__(self, responses: Responses) -> list[RolloutRecord]:
        """Return a record of each response."""
        prompts, batch = responses.prompts, responses.batch
        turns: Sequence[list[dict[str, str]] | None] = [None] * len(batch)
        read = [prompt.text for prompt in prompts]
        if self._config.agent is not None:  # whose program writes its own prompts
            read = self._decode_all(row.tolist() for row in batch.prompts.rows())
        if self._config.earns_rewards:
            environment = self._config.environment
            role = "user" if environment is None else environment.role
            turns = conversations(batch, self._decode, role)
        return rollout_records(prompts, batch, responses.rewarded, self._secrets, turns, read)


class Records(Observer):
    """Files of the steps of trainer.samples_every_steps and of evaluations, and samples to look at.

    Args:
        records: builds the records of responses.
        updates: computes log-probs after the update.
        decode: token ids -> texts, special tokens included.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        records: Callable[[Responses], list[RolloutRecord]],
        updates: Updates,
        decode: Decode,
        console: RunConsole,
        tracker: Tracker,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._records = records
        self._updates = updates
        self._decode = decode
        self._console = console
        self._tracker = tracker
        self._files = BestEffortFiles()

    def scored(self, step: int, responses: Responses) -> None:
        """Store the step's rollouts and show samples, if due."""
        if not is_due(self._config.trainer.samples_every_steps, step):
            return
        records = self._records(responses)
        self._files.attempt("rollouts/", lambda: write_rollouts(self._run_dir, step, records))
        self._show_images(responses)
        samples = pick_samples(records)
        self._console.samples(step, samples)
        self._tracker.show("samples", step, samples_text(samples))
        self._tracker.show("rewards", step, torch.tensor(responses.rewarded.scores))
        self._tracker.show("response_lengths", step, responses.batch.responses.lengths)

    def updated(self, step: int, trained: Trained) -> None:
        """Store the tokens of some responses and the shares of experts; show the advantages."""
        batch, responses = trained.batch, trained.responses
        if "router/load_max" in trained.metrics:
            shares = self._updates.expert_shares()
            self._files.attempt("experts/", lambda: write_experts(self._run_dir, step, shares))
        if responses is None:  # of supervised fine-tuning
            return
        self._tracker.show("advantages", step, batch.advantages.values[batch.counted.values])
        if count := self._config.tracking.token_samples:
            rows = pick_rows(batch, responses.rewarded.scores, count)
            chosen = batch.select(rows)
            updated = self._updates.token_stats(chosen)
            self._write_tokens(step, rows, chosen, updated)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Store the held-out responses by kind, unless there are no records."""
        if self._config.trainer.samples_every_steps:
            kinds = {kind: self._records(one) for kind, one in evaluation.responses.items()}
            self._files.attempt("rollouts/", lambda: write_evaluation(self._run_dir, step, kinds))
            for one in evaluation.responses.values():
                self._show_images(one)

    def _show_images(self, responses: Responses) -> None:
        """Store the images of prompts, scaled down."""
        self._files.attempt("images/", lambda: write_thumbnails(self._run_dir, responses.prompts))

    def after(self, record: StepRecord) -> StepRecord:
        """Add the number of writes that failed; write the timeline of a recorded step."""
        lost = float(self._tracker.lost + self._files.failures)
        return record.adding({"run/lost_writes": lost})

    def failures(self) -> list[str]:
        """Describe what could not be written."""
        return self._files.lines()

    def _write_tokens(
        self, step: int, rows: Sequence[int], batch: RolloutBatch, updated: Ragged
    ) -> None:
        """Store the tokens of the responses `rows`, which are `batch`, with `token_stats`."""
        loss, cut = self._config.algorithm.loss, None
        if trains_policy(self._config, step):
            cut = clipped(batch, updated.values.real, loss)
        table = token_table(batch, rows, updated, cut, self._decode)
        self._files.attempt("tokens/", lambda: write_tokens(self._run_dir, step, table))
