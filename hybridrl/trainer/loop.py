"""Loop of every kind of training: steps, evaluations, checkpoints, callbacks, the end.

It runs in the driver process. It holds no weights and calls the worker groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.signals import Preempted, Preemption
from hybridrl.controller.worker_group import Call, Workers, call_together
from hybridrl.data.batch import Generate, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule, update_sizes
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt
from hybridrl.models.resolve import FINAL, read_model_config
from hybridrl.trainer.advantage import KLControl
from hybridrl.trainer.callbacks import Callback, call_each
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.factory import open_source
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.rewarding import (
    Rewarded,
    RewardSource,
)
from hybridrl.trainer.sampling.generation import Generation
from hybridrl.trainer.sampling.hybrid_engine import engine_of
from hybridrl.trainer.sampling.source import SourceParts
from hybridrl.trainer.state import RunResult, TrainState
from hybridrl.trainer.timing.phases import GraceCheck, Phases, StepProfiler
from hybridrl.trainer.tracking.report import Reporter, is_due
from hybridrl.trainer.tracking.rollout_log import RolloutRecord
from hybridrl.trainer.tracking.tracker import Row


class TrainingLoop:
    """Loop over the steps of a run; subclasses say what a step trains on."""

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        prompts: PromptSource,
        generator: Generate,
        rewards: RewardSource,
        evaluator: Evaluator,
        checkpoints: Checkpointer,
        preemption: Preemption,
        reporter: Reporter,
        callbacks: Sequence[Callback] = (),
        resume: Resume | None = None,
    ) -> None:
        self.config = config
        self.workers = workers
        self.kl = KLControl(config.algorithm.kl)
        self.prompts = prompts
        self.rewards = rewards
        self.engine = engine_of(workers, config.fsdp.offload)
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.preemption = preemption
        self.reporter = reporter
        shape = model_shape(read_model_config(config.model.path))
        self.sizes = update_sizes(config.actor, workers.actor.num_shards, shape)
        beside = range(0) if workers.sender is None else workers.rollout.ranks
        self.phases = Phases(workers.pool.spans.take, reporter.phase, beside)
        steps = config.trainer.profile_steps
        self.profiler = StepProfiler(steps, workers.pool, reporter.run_dir, self.phases)
        self.grace = GraceCheck(config.checkpoint.on_sigterm, reporter.warn)
        self.guard = NonFiniteGuard(config, reporter.run_dir, checkpoints.write_state)
        lengths = ResponseLengths()
        self.generate = Generation(generator, self.engine, lengths)
        self.source = open_source(
            SourceParts(
                config,
                prompts.take,
                self.generate,
                rewards,
                workers.rollout,
                self.trains_policy,
                self.phases.section,
            )
        )
        self.state = TrainState(prompts, self.kl, self.engine, self.guard, lengths, self.source)
        self.metrics: dict[str, float | None] = {}
        self.callbacks, self.resumes_from = callbacks, resume
        self.has_begun = self.is_stopped = False
        # Of the last step.
        self.row: Row = {} if resume is None or not resume.rows else resume.rows[-1]
        self.batch: RolloutBatch | None = None
        self.scored: tuple[list[Prompt], RolloutBatch, Rewarded] | None = None

    def fit(self) -> RunResult:
        """Train the remaining steps, up to trainer.total_steps, and save the model.

        Raises:
            Preempted: SIGTERM or SIGHUP arrived, and a checkpoint was written.
            RunStopped: too many updates in a row were not finite, or a callback failed.
        """
        if not self.has_begun:
            self.begin(evaluates=self.config.eval.before_training)
        while self.state.step < self.config.trainer.total_steps and not self.is_stopped:
            self.step()
        if self.is_stopped and self.config.checkpoint.every_steps:
            self.checkpoint_now()
        self.checkpoints.finish()
        self.save()
        self.reporter.finish(self.checkpoints.failures)
        accuracy = self.evaluator.last_accuracy
        return RunResult(accuracy, self.reporter.run_dir, self.state.step, self.row)

    def step(self) -> Row:
        """Sample, train, evaluate and checkpoint if due, report; return the metrics."""
        step = self.state.step + 1
        self.batch = self.scored = None  # freed before the next one is sampled
        with self.profiler.step(step), self.phases.step():
            self.train(step)
            if self.evaluates(step):
                self.evaluation(step)
            self.checkpoint(step)
        self.log(step)
        self.guard.check()
        call_each(self.callbacks, "on_step_end", self, step, self.row)
        self.pause()
        return self.row

    @property
    def samples(self) -> list[RolloutRecord]:
        """Texts and scores of the last step, in the order of `batch`."""
        return [] if self.scored is None else self.reporter.records(*self.scored)

    def stop(self) -> None:
        """Make `fit` end after the current step, with a checkpoint; for callbacks."""
        self.is_stopped = True

    def train(self, step: int) -> None:
        """Do the step's updates; each kind of training has its own."""
        raise NotImplementedError

    def begin(self, *, evaluates: bool) -> None:
        """Restore the checkpoint to resume from; without one, evaluate the initial model."""
        self.has_begun = True
        if self.resumes_from is not None:
            return self.resume(self.resumes_from)
        if evaluates:
            with self.phases.step():
                self.evaluation(step=0)
            self.log(step=0)
        self.state.commit(step=0)
        self.checkpoints.step_ended()

    def resume(self, resume: Resume) -> None:
        """Restore the state of a checkpoint, whose metrics were already reported."""
        for note in self.checkpoints.load(resume.found):
            self.reporter.warn(note)
        with self.phases.section("reshard"):
            self.state.restore(resume.state)
        self.evaluator.last_accuracy = resume.last_accuracy
        self.checkpoints.load_generators()
        self.checkpoints.step_ended()

    def pause(self) -> None:
        """End the run here if a signal has arrived.

        Until the update, weights and optimizer state are those of the step before.
        """
        if self.preemption.is_asked:
            raise Preempted(self.preemption.asked_by[0], self.checkpoint_now())

    def checkpoint_now(self) -> Path | None:
        """Write the checkpoint of the last finished step; return None if it failed."""
        self.engine.make_room_for_optimizer()
        return self.checkpoints.save_now(self.state.finished())

    def reshard(self) -> None:
        """Copy the actor's weights to vLLM, unless it holds them."""
        if not self.engine.is_current:
            with self.phases.section("reshard"):
                self.metrics |= self.engine.reshard()

    def update(self, scheduled: ScheduledBatch, step: int) -> None:
        """Run optimizer steps of the critic and, after its warm-up, of the actor.

        An adaptive KL coefficient changes last, so that the whole step uses one value.
        """
        self.batch, calls = scheduled.batch, {}
        if self.workers.critic is not None:
            calls["update_critic"] = Call(self.workers.critic, "update", (step,))
        if trains_policy := self.trains_policy(step):
            arguments = (step, self.kl.loss_coef)
            calls["update_actor"] = Call(self.workers.actor, "update", arguments)
        with self.phases.section("update"):
            outcomes = call_together(calls, scheduled)
        self.phases.split("update", outcomes)
        self.engine.weight_version += trains_policy
        for outcome in outcomes.values():
            self.metrics |= outcome.value
        if "router/load_max" in self.metrics and self.reporter.is_recorded(step):
            self.reporter.log_experts(step, self.workers.actor.call("expert_shares"))
        self.guard.note(step, scheduled, self.kl.loss_coef, self.metrics)
        self.metrics |= self.kl.adapt(scheduled.batch)

    def trains_policy(self, step: int) -> bool:
        """Return true unless only the critic is trained in the step."""
        warmup = 0 if self.workers.critic is None else self.config.trainer.critic_warmup_steps
        return step > warmup

    def forward_any(self, method: str, batch: RolloutBatch) -> Ragged:
        """Run a forward method of the actor on any number of responses.

        Responses are repeated until all ranks have the same number.
        """
        batch = replace(batch, episode=None)
        count, shards = len(batch), self.sizes.num_shards
        whole = -(-count // shards) * shards
        repeated = batch.select([index % count for index in range(whole)])
        sizes = replace(self.sizes, mini_batch_size=whole, epochs=1)
        scheduled = schedule(repeated, sizes, seed=self.config.seed, step=0)
        found: Ragged = self.workers.actor.call(method, scheduled)
        return found.select(range(count))

    def evaluates(self, step: int) -> bool:
        """Return true if the step ends with an evaluation; after a signal, only the last does."""
        if step == self.config.trainer.total_steps or self.is_stopped:
            return True
        return is_due(self.config.eval.every_steps, step) and not self.preemption.is_asked

    def evaluation(self, step: int) -> Row:
        """Evaluate the actor's weights; return the metrics eval/..., which the callbacks get."""
        self.reshard()
        self.evaluate(step)
        found = {name: value for name, value in self.metrics.items() if name.startswith("eval/")}
        call_each(self.callbacks, "on_evaluation", self, step, found)
        return found

    def evaluate(self, step: int) -> None:
        """Measure the held-out accuracy of the weights that vLLM holds."""
        is_end = step in (0, self.config.trainer.total_steps) or self.is_stopped
        with self.phases.section("evaluate"):
            self.metrics |= self.evaluator.evaluate(step, self.generate, is_end=is_end)
            self.engine.end_evaluation()
            self.reporter.log_evaluation(step, self.evaluator.prompts, self.evaluator.responses)

    def checkpoint(self, step: int) -> None:
        """Begin a checkpoint if one is due; it is written while later steps run."""
        with self.phases.section("checkpoint"):
            if is_taken := self.checkpoints.is_due(step):
                self.engine.make_room_for_optimizer()
            self.state.commit(step)
            self.checkpoints.step_ended()
            if is_taken:
                self.checkpoints.begin(self.state.finished())
        self.metrics["checkpoint/failed"] = float(self.checkpoints.failures)

    def log(self, step: int) -> None:
        """Report the step's metrics and clear them."""
        self.row = self.reporter.log(step, self.metrics | self.phases.metrics())
        self.reporter.log_timeline(step, self.phases.timeline)
        self.checkpoints.logged(step, self.row)
        self.grace.look(self.phases.timeline, self.checkpoints.write_s)
        self.metrics = {}

    def save(self) -> None:
        """Write the trained model as an ordinary HF folder."""
        if self.config.trainer.save_final_model:
            folder = self.reporter.run_dir / FINAL
            # Offloaded weights return to the GPU to be gathered: the engine makes room.
            self.engine.sleep()
            problem = self.workers.actor.call("save", str(folder))
            self.reporter.saved(folder, self.workers.pool.hosts[0].node_name, problem)
