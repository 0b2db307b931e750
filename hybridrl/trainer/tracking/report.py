"""Reporter of a run: console, trackers and files behind one object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from hybridrl.config.changes import may_grow
from hybridrl.config.command.secrets import secret_values
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.untrusted_code import needs_trust
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.rows import MAX_FAULTS_SHOWN, first_faults
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.rewards.processes.messages import Failure
from hybridrl.trainer.health.health import Health
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.timing.timeline import Timeline
from hybridrl.trainer.tracking.best_effort_files import BestEffortFiles
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.provenance import plain
from hybridrl.trainer.tracking.rollout_log import (
    RolloutRecord,
    conversations,
    pick_samples,
    rollout_records,
    samples_text,
    write_evaluation,
    write_experts,
    write_rollouts,
)
from hybridrl.trainer.tracking.token_log import clipped, token_table, write_tokens
from hybridrl.trainer.tracking.tracker import Row, Tracker


class Reporter:
    """Reporter of steps, samples, records and the summary.

    `decode` leaves special tokens of responses out, `decode_all` shows them.

    Attributes:
        details: more evidence for the health checks of this step, by check.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        console: RunConsole,
        tracker: Tracker,
        throughput: Throughput,
        health: Health,
        decode: Decode,
        decode_all: Decode,
    ) -> None:
        self.run_dir = run_dir
        self._config = config
        self.phase, self.warn = console.phase, console.warn
        self._console = console
        self._tracker = tracker
        self._throughput = throughput
        self.health = health
        self.details: dict[str, Callable[[], str]] = {}
        self._files = BestEffortFiles()
        self._failed_problems: set[int] = set()
        self._secrets = {*secret_values(asdict(config))}
        self._decode, self.decode_all = decode, decode_all

    def log(self, step: int, metrics: Row) -> Row:
        """Store and show one step's metrics, with warnings; return the row."""
        lost = float(self._tracker.lost + self._files.failures)
        metrics = metrics | self._throughput.metrics(metrics) | {"run/lost_writes": lost}
        warnings = self.health.examine(metrics, self.details, step)
        self.details = {}
        row = self._tracker.log(step, metrics)
        self._console.step(row)
        for warning in warnings:
            self.warn(warning)
        return row

    def is_recorded(self, step: int) -> bool:
        """Return true if a training step is one of trainer.samples_every_steps."""
        return step > 0 and is_due(self._config.trainer.samples_every_steps, step)

    def records(
        self, prompts: list[Prompt], batch: RolloutBatch, rewarded: Rewarded
    ) -> list[RolloutRecord]:
        """Return the responses' records, with the turns of conversations."""
        turns: Sequence[list[dict[str, str]] | None] = [None] * len(batch)
        read = [prompt.text for prompt in prompts]
        if self._config.agent is not None:  # whose program writes its own prompts
            read = self.decode_all(row.tolist() for row in batch.prompts.rows())
        if self._config.earns_rewards:
            environment = self._config.environment
            role = "user" if environment is None else environment.role
            turns = conversations(batch, self._decode, role)
        return rollout_records(prompts, batch, rewarded, self._secrets, turns, read)

    def log_responses(
        self, step: int, prompts: list[Prompt], batch: RolloutBatch, rewarded: Rewarded
    ) -> None:
        """Store and show the step's rollouts if due; warn of failed rewards."""
        if rewarded.failures:
            text = self._failures_text(prompts, rewarded.failures)
            self.details["failed_rewards"] = lambda: text
        if not self.is_recorded(step):
            return
        records = self.records(prompts, batch, rewarded)
        self._files.attempt("rollouts/", lambda: write_rollouts(self.run_dir, step, records))
        samples = pick_samples(records)
        self._console.samples(step, samples)
        self._tracker.show("samples", step, samples_text(samples))
        self._tracker.show("rewards", step, torch.tensor(rewarded.scores))
        self._tracker.show("response_lengths", step, batch.responses.lengths)

    def log_evaluation(
        self,
        step: int,
        prompts: list[Prompt],
        responses: Mapping[str, tuple[RolloutBatch, Rewarded]],
    ) -> None:
        """Store the held-out responses of an evaluation, by kind, unless there are no records."""
        if self._config.trainer.samples_every_steps:
            kinds = {kind: self.records(prompts, *found) for kind, found in responses.items()}
            self._files.attempt("rollouts/", lambda: write_evaluation(self.run_dir, step, kinds))

    def log_tokens(
        self, step: int, rows: Sequence[int], batch: RolloutBatch, updated: Ragged, *, trained: bool
    ) -> None:
        """Store the tokens of the step's responses `rows`, which are `batch`.

        `updated` has their log-probs and entropies after the update (real and imaginary part), in
        which the policy was `trained` or, in the critic's warm-up, not.
        """
        loss = self._config.algorithm.loss
        cut = clipped(batch, updated.values.real, loss) if trained else None
        table = token_table(batch, rows, updated, cut, self.decode_all)
        self._files.attempt("tokens/", lambda: write_tokens(self.run_dir, step, table))

    def log_advantages(self, step: int, batch: RolloutBatch) -> None:
        """Show the distribution of the advantages of the tokens in the loss mask."""
        assert batch.advantages is not None
        values, mask = batch.advantages.values, batch.counted.values
        self._tracker.show("advantages", step, values[mask])

    def log_experts(self, step: int, shares: list[list[float]]) -> None:
        """Store each expert's share of its layer's choices in the step's update."""
        self._files.attempt("experts/", lambda: write_experts(self.run_dir, step, shares))

    def log_timeline(self, step: int, timeline: Timeline) -> None:
        """Store the timeline of a recorded step in timeline.jsonl."""
        if self.is_recorded(step):
            self._tracker.log_timeline(timeline.record(step))

    def _failures_text(self, prompts: list[Prompt], failures: Sequence[Failure]) -> str:
        """Describe the first failed reward, with the places of problems not named before."""
        text = f"{failures[0].kind}: {failures[0].reason}"
        new: dict[int, str] = {}
        for failure in failures:
            prompt = prompts[failure.index]
            if prompt.prompt_id not in self._failed_problems:
                new.setdefault(prompt.prompt_id, f"{prompt.where}: {failure.reason}")
        self._failed_problems.update([*new][:MAX_FAULTS_SHOWN])
        return "\n".join([text, first_faults([*new.values()])] if new else [text])

    def saved(self, folder: Path, node: str, problem: str | None) -> None:
        """Warn if the trained model could not be written, or only on `node`."""
        if problem is not None:
            self.warn(
                f"{folder} could not be written: {problem}\nOnce there is room, `hybridrl export "
                f"{self.run_dir} <folder>` writes it from the last checkpoint."
            )
        elif not (folder / "config.json").is_file():
            self.warn(
                f"{folder} does not exist on this node: it is on {node}. Set hydra.run.dir to a "
                "directory that all nodes share."
            )

    def finish(self, failed_checkpoints: int) -> None:
        """Print the summary."""
        for failure in [*self._tracker.failures(), *self._files.lines()]:
            self.warn(failure)
        config = plain(self._config)
        self._console.summary(
            self._tracker.rows,
            failed_checkpoints,
            self.run_dir,
            needs_trust=needs_trust(config),
            may_grow=may_grow(config),
            epochs=self._config.trainer.epochs,
            has_report=self._config.tracking.report,
        )


def is_due(every: int, step: int) -> bool:
    """Return true if something done every n steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
