"""A training step of PPO and its relatives, and the loop over the steps of a run.

The loop runs in the driver process. It holds no weights and calls the worker groups.

| phase      | takes                     | waits for                              | returns        |
|------------|---------------------------|----------------------------------------|----------------|
| reshard    | the actor's shards        | fingerprints of what vLLM holds        | metrics        |
| rollout    | the source's next groups  | their last responses                   | Sampled        |
| score      | Sampled                   | actor, reference, critic; rewards      | Scored         |
| advantage  | the scheduled batch       | nothing: pure functions                | ScheduledBatch |
| update     | the scheduled batch       | optimizer steps of critic and actor    | metrics        |
| swap       | with split: new weights   | engines that have sampled meanwhile    | metrics        |
| record     | Trained, at some steps    | observers                              |                |
| evaluate   | held-out problems, if due | their responses by these weights       | metrics        |
| checkpoint | the state, if due         | its copy in host memory                | metrics        |

A step ends as a `StepRecord`, which the observers get: health, metrics, console, callbacks
(`app/session.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from hybridrl.config.schema import RunConfig
from hybridrl.trainer.advantage import Advantages
from hybridrl.trainer.checkpointing.saves import Saves
from hybridrl.trainer.evaluate import Evaluations
from hybridrl.trainer.record import Observer, Row, RunHandle, RunResult, StepRecord, Trained
from hybridrl.trainer.sampling.rollouts import Rollouts
from hybridrl.trainer.sampling.start_check import StartCheck
from hybridrl.trainer.scoring import Scoring
from hybridrl.trainer.sft import SFT, GivenAnswers
from hybridrl.trainer.timing.phases import Phases, StepProfiler
from hybridrl.trainer.updates import Updates


@dataclass(frozen=True)
class PPO:
    """PPO and its relatives: sampled responses, rewards, advantages, clipped updates."""

    rollouts: Rollouts
    start: StartCheck
    scoring: Scoring
    advantages: Advantages
    updates: Updates
    given: GivenAnswers

    def train(self, step: int, pause: Callable[[], None]) -> Trained:
        """Sample and train; until the update, weights are those of the step before."""
        if self.given.are_due(step):
            return self.given.train(step)
        reshard = self.rollouts.reshard()
        self.start.sample()
        sampled, rollout = self.rollouts.take(step)
        self.start.compare()
        pause()
        scored = self.scoring.score(sampled, step, self.rollouts.weight_version)
        scheduled, advantage = self.advantages.estimate(scored.scheduled, step)
        pause()
        update = self.updates.update(scheduled, step)
        swap = self.rollouts.source.after_update(step)
        metrics = reshard | rollout | scored.metrics | advantage | update | swap
        return Trained(scheduled.batch, metrics, scored.responses)


@dataclass(frozen=True)
class TrainingLoop:
    """Loop over the steps of a run; `run` is what user code sees and stops."""

    config: RunConfig
    training: PPO | SFT
    evaluations: Evaluations
    saves: Saves
    phases: Phases
    profiler: StepProfiler
    observer: Observer
    run: RunHandle

    def fit(self) -> RunResult:
        """Train the remaining steps, up to trainer.total_steps, and save the model.

        Raises:
            Preempted: SIGTERM or SIGHUP arrived, and a checkpoint was written.
            RunStopped: too many updates in a row were not finite, or a callback failed.
        """
        self.begin(evaluates=self.config.eval.before_training)
        while self.saves.step < self.config.trainer.total_steps and not self.run.is_stopped:
            self.step()
        folder = self.saves.finish(stopped=self.run.is_stopped)
        result = RunResult(self.evaluations.accuracy, folder, self.saves.step, self.run.row)
        self.observer.end(result)
        return result

    def begin(self, *, evaluates: bool) -> None:
        """Once: restore the checkpoint to resume from, or evaluate the initial model."""
        if self.saves.has_begun or self.saves.resume():
            return
        if evaluates:
            with self.phases.step():
                metrics = self.evaluations.evaluate(0, is_end=True)
            self.observe(0, metrics)
        self.saves.begin()

    def step(self) -> Row:
        """Train, evaluate and checkpoint if due; return the step's row of metrics.jsonl."""
        step = self.saves.step + 1
        self.run.publish(None)  # frees the last batch before the next one is sampled
        with self.profiler.step(step), self.phases.step():
            trained = self.training.train(step, self.saves.pause)
            self.run.publish(trained)
            self.observer.updated(step, trained)
            is_end = step == self.config.trainer.total_steps or self.run.is_stopped
            every = self.config.eval.every_steps
            evaluate = self.evaluations.if_due(step, every, is_end=is_end)
            checkpoint = self.saves.checkpoint(step)
        row = self.observe(step, trained.metrics | evaluate | checkpoint, trained)
        self.saves.pause()
        return row

    def observe(self, step: int, metrics: Row, trained: Trained | None = None) -> Row:
        """Pass a finished step to the observers; return its row of metrics.jsonl."""
        metrics = metrics | self.phases.metrics()
        record = StepRecord(step, metrics, trained, self.phases.timeline)
        self.run.row = self.observer.after(record).metrics
        return self.run.row
