"""Everything a run tells its user and keeps, behind one object that the loop talks to."""

from collections.abc import Sequence, Set
from dataclasses import asdict
from pathlib import Path

from hybridrl.config.command.secrets import secret_values, without_secrets
from hybridrl.config.schema import RunConfig
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.rows import MAX_FAULTS_SHOWN, first_faults
from hybridrl.rewards.scorer import Failure
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.tracking.best_effort_files import SpareFiles
from hybridrl.trainer.tracking.console import RunConsole, pick_samples
from hybridrl.trainer.tracking.plot import PLOT_FILE, plot_run
from hybridrl.trainer.tracking.rollout_log import RolloutRecord, write_rollouts
from hybridrl.trainer.tracking.summary import summarize
from hybridrl.trainer.tracking.tracker import Row, Tracker

# Counts that stop no run but should not pass unseen.
WORTH_A_WARNING = {
    "actor/skipped_steps": "updates of the actor skipped: loss or gradient was not finite",
    "critic/skipped_steps": "updates of the critic skipped: loss or gradient was not finite",
    "eval/failed": "judgements of held-out responses failed: the accuracies count them as wrong",
}


class Reporter:
    """Shows steps and samples, keeps metrics and rollouts, sums the run up.

    Args:
        config: the run.
        run_dir: existing directory of the run.
        console: where the user looks.
        tracker: where metrics go.
        throughput: what a step's times say of its speed.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        console: RunConsole,
        tracker: Tracker,
        throughput: Throughput,
    ) -> None:
        self.run_dir = run_dir
        self._config = config
        self._console = console
        self._tracker = tracker
        self._throughput = throughput
        self._files = SpareFiles()
        self._failed_problems: set[int] = set()
        self._secrets = {*secret_values(asdict(config))}

    def phase(self, name: str) -> None:
        """A phase begins."""
        self._console.phase(name)

    def warn(self, text: str) -> None:
        """Something the user should look at; the run goes on."""
        self._console.warn(text)

    def log(self, step: int, metrics: Row) -> Row:
        """Keep and show one step's metrics, and say what went wrong in it; returns the row."""
        lost = float(self._tracker.lost + self._files.failures)
        metrics = metrics | self._throughput.metrics(metrics) | {"run/lost_writes": lost}
        row = self._tracker.log(step, metrics)
        self._console.step(row)
        for name, what in WORTH_A_WARNING.items():
            if count := metrics.get(name):
                self._console.warn(f"step {step}: {count:.0f} {what}")
        return row

    def saw_responses(
        self, step: int, prompts: list[Prompt], responses: Ragged, rewarded: Rewarded
    ) -> None:
        """Keep and show the step's rollouts where they are due; warn of failed rewards."""
        if rewarded.failures:
            self._warn_of_failures(step, prompts, rewarded.failures)
        if not is_due(self._config.trainer.samples_every_steps, step):
            return
        records = _records(prompts, responses, rewarded, self._secrets)
        self._files.attempt("rollouts/", lambda: write_rollouts(self.run_dir, step, records))
        self._console.samples(step, pick_samples(records))

    def _warn_of_failures(
        self, step: int, prompts: list[Prompt], failures: Sequence[Failure]
    ) -> None:
        """Say how many rewards failed, and of problems not named before where they stand."""
        first = failures[0]
        text = (
            f"step {step}: {len(failures)} of {len(prompts)} rewards failed and got "
            f"{self._config.reward.failed_score:g}; the first: {first.kind}: {first.reason}"
        )
        new: dict[int, str] = {}
        for failure in failures:
            prompt = prompts[failure.index]
            if prompt.prompt_id not in self._failed_problems:
                new.setdefault(prompt.prompt_id, f"{prompt.where}: {failure.reason}")
        self._failed_problems.update([*new][:MAX_FAULTS_SHOWN])
        self._console.warn("\n".join([text, first_faults([*new.values()])] if new else [text]))

    def saved(self, folder: Path, node: str, problem: str | None) -> None:
        """The trained model was written by the first rank, on `node`, or could not be."""
        if problem is not None:
            self._console.warn(
                f"{folder} could not be written: {problem}\nOnce there is room, `hybridrl export "
                f"{self.run_dir} <folder>` writes it from the last checkpoint."
            )
        elif not (folder / "config.json").is_file():
            self._console.warn(
                f"{folder} is not to be seen here: it lies on {node}. Let the run directory be on "
                "storage that all nodes share."
            )

    def finish(self, failed_checkpoints: int) -> None:
        """Draw the curves and sum the run up.

        Args:
            failed_checkpoints: that could not be written since the run was started.
        """
        self._files.attempt(PLOT_FILE, lambda: draw(self._config, self.run_dir))
        for failure in [*self._tracker.failures(), *self._files.lines()]:
            self._console.warn(failure)
        self._console.summary(summarize(self._tracker.rows, failed_checkpoints), self.run_dir)


def draw(config: RunConfig, run_dir: Path) -> None:
    """Draw the curves of the steps so far."""
    plot_run(run_dir, f"{config.run.name}, seed {config.seed}")


def is_due(every: int, step: int) -> bool:
    """Whether something done every so many steps (0: never) falls on this one."""
    return every > 0 and step % every == 0


def _records(
    prompts: list[Prompt], responses: Ragged, rewarded: Rewarded, secrets: Set[str]
) -> list[RolloutRecord]:
    """The step's rollouts; `secrets` and those of the environment are hidden in reasons."""
    reasons = {
        failure.index: without_secrets(f"{failure.kind}: {failure.reason}", secrets)
        for failure in rewarded.failures
    }
    rows = zip(prompts, rewarded.texts, rewarded.scores, responses.lengths.tolist(), strict=True)
    return [
        RolloutRecord(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            question=prompt.question,
            response=text,
            answer=str(prompt.example["answer"]),
            score=score,
            length=length,
            failure=reasons.get(index),
        )
        for index, (prompt, text, score, length) in enumerate(rows)
    ]
