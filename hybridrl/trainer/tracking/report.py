"""Reporter of a run: console, trackers and files behind one object."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hybridrl.config.command.secrets import secret_values
from hybridrl.config.schema import RunConfig
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.rows import MAX_FAULTS_SHOWN, first_faults
from hybridrl.rewards.processes.messages import Failure
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.timing.throughput import Throughput
from hybridrl.trainer.tracking.best_effort_files import BestEffortFiles
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.health import Health
from hybridrl.trainer.tracking.plot import PLOT_FILE, draw
from hybridrl.trainer.tracking.rollout_log import (
    pick_samples,
    rollout_records,
    samples_text,
    write_rollouts,
)
from hybridrl.trainer.tracking.tracker import Row, Tracker


class Reporter:
    """Reporter of steps, samples, rollouts and the summary."""

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
        self.phase, self.warn = console.phase, console.warn
        self._console = console
        self._tracker = tracker
        self._throughput = throughput
        self._health = Health(config)
        self._files = BestEffortFiles()
        self._failed_problems: set[int] = set()
        self._secrets = {*secret_values(asdict(config))}

    def log(self, step: int, metrics: Row) -> Row:
        """Store and show one step's metrics, with warnings; return the row."""
        lost = float(self._tracker.lost + self._files.failures)
        metrics = metrics | self._throughput.metrics(metrics) | {"run/lost_writes": lost}
        row = self._tracker.log(step, metrics)
        self._console.step(row)
        for warning in self._health.warnings(step, row):
            self.warn(warning)
        return row

    def log_responses(
        self, step: int, prompts: list[Prompt], responses: Ragged, rewarded: Rewarded
    ) -> None:
        """Store and show the step's rollouts if due; warn of failed rewards."""
        if rewarded.failures:
            self._warn_of_failures(step, prompts, rewarded.failures)
        if not is_due(self._config.trainer.samples_every_steps, step):
            return
        records = rollout_records(prompts, responses, rewarded, self._secrets)
        self._files.attempt("rollouts/", lambda: write_rollouts(self.run_dir, step, records))
        samples = pick_samples(records)
        self._console.samples(step, samples)
        self._tracker.text("samples", step, samples_text(samples))

    def _warn_of_failures(
        self, step: int, prompts: list[Prompt], failures: Sequence[Failure]
    ) -> None:
        """Warn of failed rewards, with the places of problems not named before."""
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
        self.warn("\n".join([text, first_faults([*new.values()])] if new else [text]))

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
        """Draw the curves and print the summary."""
        title = f"{self._config.run.name}, seed {self._config.seed}"
        self._files.attempt(PLOT_FILE, lambda: draw(self.run_dir, title))
        for failure in [*self._tracker.failures(), *self._files.lines()]:
            self.warn(failure)
        self._console.summary(self._tracker.rows, failed_checkpoints, self.run_dir)


def is_due(every: int, step: int) -> bool:
    """Return true if something done every n steps (0: never) is due after this step."""
    return every > 0 and step % every == 0
