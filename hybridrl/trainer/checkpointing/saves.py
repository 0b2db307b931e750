"""State of a run over its steps: begun, resumed, checkpointed, saved at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.estimators import trains_reward_model
from hybridrl.config.schema import RunConfig
from hybridrl.controller.signals import Preempted, Preemption
from hybridrl.controller.worker_group import Workers
from hybridrl.models.resolve import FINAL
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.record import Row
from hybridrl.trainer.state import TrainState
from hybridrl.trainer.timing.phases import Phases


@dataclass
class Saves:
    """Checkpoints and the trained model of a run.

    Attributes:
        resumes_from: checkpoint that the run goes on from; None for a new run.
        preemption: signals that end the run.
        warn: shows a warning.
        has_begun: the state before the first step is there.
    """

    config: RunConfig
    workers: Workers
    state: TrainState
    checkpoints: Checkpointer
    preemption: Preemption
    phases: Phases
    run_dir: Path
    warn: Callable[[str], None]
    resumes_from: Resume | None = None
    has_begun: bool = False

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.state.step

    def begin(self) -> None:
        """Take the snapshot before the first step of a new run."""
        self.state.commit(step=0)
        self.checkpoints.step_ended()
        self.has_begun = True

    def resume(self) -> bool:
        """Restore the checkpoint to resume from; return false if there is none."""
        if self.resumes_from is None:
            return False
        for note in self.checkpoints.load(self.resumes_from.checkpoint):
            self.warn(note)
        with self.phases.section("reshard"):
            self.state.restore(self.resumes_from.state)
        self.checkpoints.load_generators()
        self.checkpoints.step_ended()
        self.has_begun = True
        return True

    def pause(self) -> None:
        """End the run here if a signal has arrived.

        Until the update, weights and optimizer state are those of the step before.

        Raises:
            Preempted: after a checkpoint of the last finished step.
        """
        if self.preemption.is_asked:
            raise Preempted(self.preemption.asked_by[0], self._save_now())

    def checkpoint(self, step: int) -> Row:
        """Begin a checkpoint if one is due; it is written while later steps run."""
        with self.phases.section("checkpoint"):
            if is_taken := self.checkpoints.is_due(step):
                self.state.engine.make_room_for_optimizer()
            self.state.commit(step)
            self.checkpoints.step_ended()
            if is_taken:
                self.checkpoints.begin(self.state.finished())
        return {"checkpoint/failed": float(self.checkpoints.failures)}

    def finish(self, *, stopped: bool) -> Path:
        """Wait for checkpoints and write the trained model; return the run's directory.

        `stopped`: the run ends before its last step, after which a checkpoint is due.
        """
        if stopped and self.config.checkpoint.every_steps:
            self._save_now()
        self.checkpoints.finish()
        if self.config.trainer.save_final_model:
            self._save_model(self.run_dir / FINAL)
        return self.run_dir

    def _save_now(self) -> Path | None:
        """Write the checkpoint of the last finished step; return None if it failed."""
        self.state.engine.make_room_for_optimizer()
        return self.checkpoints.save_now(self.state.finished())

    def _save_model(self, folder: Path) -> None:
        """Write the trained model as a folder of Hugging Face's format."""
        # Offloaded weights return to the GPU to be gathered: the engine makes room.
        self.state.engine.sleep()
        trained = self.workers.actor
        if trains_reward_model(self.config) and self.workers.critic is not None:
            trained = self.workers.critic
        problem = trained.call("save", str(folder))
        if problem is not None:
            advice = (
                f"`hybridrl export {self.run_dir} <folder>` writes it from the last checkpoint."
            )
            if trained is self.workers.critic:
                total = self.config.trainer.total_steps + 1
                advice = f"`hybridrl resume {self.run_dir} trainer.total_steps={total}` writes it."
            self.warn(f"{folder} could not be written: {problem}\nOnce there is room, {advice}")
        elif not (folder / "config.json").is_file():
            self.warn(
                f"{folder} does not exist on this node: it is on "
                f"{self.workers.pool.hosts[0].node_name}. Set hydra.run.dir to a directory that "
                "all nodes share."
            )
