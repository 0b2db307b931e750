"""Stops a run whose optimizer steps are all skipped, and keeps the batch that shows why."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.untrusted_code import untrusted_code
from hybridrl.data.schedule import ScheduledBatch
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.replay.batch import REPLAY_FOLDER, ReplayBatch, write_replay
from hybridrl.trainer.tracking.manifest import plain

WEIGHTS_FOLDER = "weights"
ROLES = ("actor", "critic")


@dataclass
class SkippedSteps:
    """Optimizer steps skipped in a row, over training steps; a resumed run goes on counting.

    Attributes:
        count: by role, how many of the last ones.
        since: by role, the training step in which these begin; only of roles with such steps.
    """

    count: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)

    def note(self, step: int, metrics: Mapping[str, float | None], num_steps: int) -> None:
        """Count what an update skipped.

        Args:
            step: training step.
            metrics: of it; those of roles that were not trained are missing.
            num_steps: optimizer steps that each role was to take.
        """
        for role in ROLES:
            if f"{role}/skipped_last" not in metrics:
                continue
            last = int(metrics[f"{role}/skipped_last"] or 0)
            if last < num_steps:  # one was taken before them
                self.count[role] = 0
            if last and not self.count.get(role):
                self.since[role] = step
            self.count[role] = self.count.get(role, 0) + last
            if not self.count[role]:
                self.since.pop(role, None)


class NonFiniteGuard:
    """Watches for updates that are skipped; keeps each step's batch until it is checked.

    Args:
        config: the run.
        run_dir: of the run.
        save_weights: writes the workers' state as it is into a folder that is not there yet.

    Attributes:
        skipped: what a resumed run must know.
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
        """Look at an update.

        Args:
            step: training step.
            scheduled: what the update was computed from.
            kl_coef: weight of the KL penalty in its loss.
            metrics: of the update.
        """
        self._met = (step, scheduled, kl_coef)
        self.skipped.note(step, metrics, sum(map(len, scheduled.ranks[0])))

    def check(self) -> None:
        """Stop the run if too many steps in a row were skipped.

        Raises:
            RunStopped: as many as trainer.max_skipped_steps; the batch and the weights that met it
                are kept.
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

    def _keep(self, role: str) -> str:
        """Write what a replay needs; says where it is."""
        assert self._met is not None
        step, scheduled, kl_coef = self._met
        folder = self._run_dir / REPLAY_FOLDER / f"step_{step}"
        kept = ReplayBatch(role, step, kl_coef, scheduled.batch, scheduled.ranks, self._config)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that got here before
            write_replay(folder, kept)
            # No step was taken since they met the last mini-batches that were skipped.
            self._save_weights(folder / WEIGHTS_FOLDER)
        except OSError as error:
            return f"The batch could not be saved in {folder}: {error}"
        names_code = any(untrusted_code(plain(self._config)))
        return (
            f"The batch and the weights that met it are in {folder}.\n"
            f"To see which responses do it: hybridrl replay {folder}"
            f"{' --run-code' if names_code else ''}"
        )
