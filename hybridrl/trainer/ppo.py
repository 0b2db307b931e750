"""PPO as data flows through it.

    reshard     actor FSDP shards -> vLLM TP slices, in place
    rollout     prompts -> responses, rollout_log_probs
    score       old_log_probs, ref_log_probs, values, model scores; meanwhile rewards -> scores
    advantage   rewards -> advantages, returns
    update      critic and actor, packed micro-batches
    log, evaluate, checkpoint

The trainer runs in the driver process: it holds no weights and calls the roles by name.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybridrl.config.estimators import estimator_of
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.calls import TimedResult
from hybridrl.controller.signals import Preempted, Preemption
from hybridrl.controller.worker_group import Call, Workers, begin_together, call_together
from hybridrl.data.batch import PromptBatch, Rollout
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule, update_sizes
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.advantage import AdvantageEstimator
from hybridrl.trainer.baseline import Baseline, GreedyBaseline, NoBaseline
from hybridrl.trainer.checkpointing.checkpointer import Checkpointer
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.evaluate import Evaluator
from hybridrl.trainer.hybrid_engine import HybridEngine
from hybridrl.trainer.kl_control import KLControl
from hybridrl.trainer.loss_inputs import LossFields
from hybridrl.trainer.mismatch import adapter_share, check_rollout_log_probs
from hybridrl.trainer.replay.nonfinite import NonFiniteGuard
from hybridrl.trainer.reward_model import reward_model_for
from hybridrl.trainer.rewarding import (
    Judge,
    Rewarded,
    outcome_metrics,
    outcome_on_last_token,
    overlong_shaping,
)
from hybridrl.trainer.sampling import Sampled, sampling_for
from hybridrl.trainer.state import TrainState
from hybridrl.trainer.timing.engines import StragglerAlarm, engine_place, straddling
from hybridrl.trainer.timing.grace import GraceCheck
from hybridrl.trainer.timing.phases import Phases
from hybridrl.trainer.timing.profiling import StepProfiler
from hybridrl.trainer.tracking.report import Reporter, is_due
from hybridrl.trainer.tracking.rollout_metrics import rollout_metrics
from hybridrl.trainer.value_function import ValueFunction


class PPOTrainer:
    """Trains the actor with PPO; one short method per phase.

    Args:
        config: the run.
        workers: groups of actor and rollout.
        kl: the reference's part, or its null object.
        value_function: the critic's part, or its null object.
        prompts: training prompts, in order.
        judge: where rewards come from.
        evaluator: held-out accuracy.
        checkpoints: what is kept to go on from.
        preemption: whether the run is asked to end.
        reporter: what the user sees and keeps.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        kl: KLControl,
        value_function: ValueFunction,
        prompts: PromptSource,
        judge: Judge,
        evaluator: Evaluator,
        checkpoints: Checkpointer,
        preemption: Preemption,
        reporter: Reporter,
    ) -> None:
        self.config = config
        self.workers = workers
        self.kl = kl
        self.value_function = value_function
        self.estimator = AdvantageEstimator(config.algorithm)
        self.loss_fields = LossFields(config.algorithm, config.seed)
        self.rewarding = judge
        self.engine = HybridEngine(workers.rollout, config.fsdp.offload)
        self.answer = judge.in_turns(self.engine.generate)
        self.sampling = sampling_for(config, prompts.take, self._generate, judge)
        self.baseline: Baseline = NoBaseline()
        if estimator_of(config.algorithm.advantage).needs_greedy_responses:
            self.baseline = GreedyBaseline(config, self._generate, judge)
        self.reward_model = reward_model_for(config, workers)
        self.overlong = overlong_shaping(config)
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self.preemption = preemption
        self.reporter = reporter
        shape = model_shape(read_model_config(config.model.path))
        self.sizes = update_sizes(config.actor, workers.actor.num_shards, shape)
        self.engine_place = partial(engine_place, workers.rollout)
        self.stragglers = StragglerAlarm(self.engine_place)
        self.straddling = straddling(workers.rollout)
        self.phases = Phases(workers.pool.spans.take, reporter.phase)
        self.profiler = StepProfiler(
            config.trainer.profile_steps,
            workers.pool,
            reporter.run_dir,
            lambda: self.phases.timeline,
        )
        self.grace = GraceCheck(config.checkpoint.on_sigterm, reporter.warn)
        self.guard = NonFiniteGuard(config, reporter.run_dir, checkpoints.write_state)
        self.state = TrainState(prompts, kl, self.engine, self.guard)
        self.metrics: dict[str, float | None] = {}

    def fit(self, resume: Resume | None = None) -> float:
        """Train up to trainer.total_steps; return the final held-out accuracy.

        Args:
            resume: what to go on from; None: the run begins.

        Raises:
            Preempted: SIGTERM or SIGHUP has come, and a checkpoint was written.
            RunStopped: too many updates in a row were not finite.
        """
        last = self.config.trainer.total_steps
        if resume is None:
            self.begin()
        else:
            self.go_on(resume)
        for step in range(self.state.step + 1, last + 1):
            with self.profiler.step(step), self.phases.step():
                self.train(step)
                if self.evaluates(step):
                    self.reshard()
                    self.evaluate(step)
                self.checkpoint(step)
            self.log(step)
            self.guard.check()
            self.pause()
        self.checkpoints.finish()
        self.save()
        self.reporter.finish(self.checkpoints.failures)
        return self.evaluator.last_accuracy

    def train(self, step: int) -> None:
        """Sample and learn; the batch is gone at the end, before the next one is sampled."""
        self.reshard()
        sampled = self.rollout(step)
        self.pause()
        scheduled = self.score(sampled, step)
        scheduled = self.advantage(scheduled, step)
        self.pause()
        self.update(scheduled, step)

    def begin(self) -> None:
        """Evaluate the model as it is."""
        with self.phases.step():
            self.reshard()
            self.evaluate(step=0)
        self.log(step=0)
        self.state.commit(step=0)
        self.checkpoints.step_ended()

    def go_on(self, resume: Resume) -> None:
        """Be as the run was when the checkpoint was taken; its metrics have been told."""
        for note in self.checkpoints.load(resume.found):
            self.reporter.warn(note)
        with self.phases.section("reshard"):
            self.state.restore(resume.state)
        self.evaluator.last_accuracy = resume.last_accuracy
        self.checkpoints.load_generators()

    def pause(self) -> None:
        """Between phases: commit a checkpoint that is written; end here if the run is asked to.

        Until the update, weights and moments are those of the step before.
        """
        self.checkpoints.poll()
        if self.preemption.is_asked:
            self.engine.make_room_for_moments()
            checkpoint = self.checkpoints.leave(self.state.finished())
            raise Preempted(self.preemption.asked_by[0], checkpoint)

    def reshard(self) -> None:
        """Bring vLLM's weights up to the actor's, unless they are."""
        if not self.engine.is_current:
            with self.phases.section("reshard"):
                self.metrics |= self.engine.reshard()

    def rollout(self, step: int) -> Sampled:
        """Sample responses to the next prompts; then vLLM gives back what rollout.sleep names."""
        with self.phases.section("rollout"):
            sampled = self.sampling.sample(step)
            self.baseline.generate(sampled.prompts, step)
            self.engine.sleep()
        seconds = self.phases.seconds("rollout")
        self.metrics |= sampled.metrics | rollout_metrics(sampled.rollout, seconds)
        self.metrics["rollout/straddling_engines"] = self.straddling
        if (switch := self.phases.switch_s) is not None:
            engines = sampled.rollout.engines
            first_token = max(engine.first_token_s for engine in engines)
            self.metrics["rollout/switch_s"] = switch + first_token
        for warning in self.stragglers.warnings(sampled.rollout.engines):
            self.reporter.warn(f"step {step}: {warning}")
        return sampled

    def reward(self, sampled: Sampled) -> tuple[Rewarded, Tensor | None]:
        """What the reward function says of the responses and, where asked for, of greedy ones."""
        batch, start = sampled.rollout.batch, time.perf_counter()
        rewarded = sampled.rewarded or self.rewarding.score(sampled.prompts, batch)
        baseline = self.baseline.rewards()
        self.metrics |= rewarded.part_metrics() | {
            "reward/seconds": time.perf_counter() - start,
            "reward/failed": float(len(rewarded.failures)),
        }
        return rewarded, baseline

    def judge(self, sampled: Sampled, rewarded: Rewarded, step: int) -> Ragged:
        """Scores of the tokens; an outcome reward stands on the last one."""
        responses = sampled.rollout.batch.responses
        penalty = self.overlong(responses.lengths)
        outcome = torch.tensor(rewarded.scores) + penalty
        self.metrics |= outcome_metrics(sampled.prompts, outcome, penalty)
        self.reporter.saw_responses(step, sampled.prompts, responses, rewarded)
        rewarded.stop_if_all_failed(step)
        return outcome_on_last_token(outcome, responses)

    def score(self, sampled: Sampled, step: int) -> ScheduledBatch:
        """Draw the mini-batches, then add old_log_probs, ref_log_probs, values and scores.

        Each is computed over exactly the micro-batches of the first epoch of the update, so that
        the policy ratio there is 1. While the workers are at it, the responses are rewarded.
        """
        calls = {
            "old_log_probs": Call(self.workers.actor, "compute_log_probs"),
            **self.kl.scores(),
            **self.value_function.scores(),
            **self.reward_model.scores(),
        }
        batch, seed = sampled.rollout.batch, self.config.seed
        with self.phases.section("score"):
            scheduled = schedule(batch, self.sizes, seed=seed, step=step)
            results = begin_together(calls, scheduled)
            rewarded, baseline = self.reward(sampled)
            outcomes = results()
            found = {name: outcome.value for name, outcome in outcomes.items()}
            rewarded, metrics = self.reward_model.added(rewarded, found)
            scores = self.judge(sampled, rewarded, step)
            judged = replace(batch, scores=scores, baseline_rewards=baseline)
            scheduled = scheduled.keeping(judged).adding(**found)
        self.phases.split("score", seconds_of(outcomes))
        self.metrics |= metrics | check_rollout_log_probs(
            scheduled.batch,
            top_p=self.config.rollout.top_p,
            limit=self.config.trainer.max_log_prob_diff,
            where=self.engine_place,
        )
        if self.config.lora is not None:
            top_p = self.config.rollout.top_p
            self.metrics |= adapter_share(scheduled.batch, top_p=top_p)
        return scheduled

    def advantage(self, scheduled: ScheduledBatch, step: int) -> ScheduledBatch:
        """Rewards after the KL penalty, then advantages, returns, and what the loss asks for."""
        with self.phases.section("advantage"):
            rewards = self.kl.rewards(scheduled.batch)
            scheduled = scheduled.adding(**self.estimator.estimate(scheduled.batch, rewards))
            fields, metrics = self.loss_fields.of_step(scheduled.batch, step)
            scheduled = scheduled.adding(**fields) if fields else scheduled
        self.metrics |= metrics | self.value_function.metrics(scheduled.batch)
        return scheduled

    def update(self, scheduled: ScheduledBatch, step: int) -> None:
        """Optimizer steps of the critic and, after its warm-up, of the actor.

        An adaptive KL coefficient moves last: the whole step uses one value.
        """
        calls = self.value_function.updates(step)
        trains_policy = step > self.value_function.warmup_steps
        if trains_policy:
            arguments = (step, self.kl.loss_coef)
            calls["update_actor"] = Call(self.workers.actor, "update", arguments)
        with self.phases.section("update"):
            outcomes = call_together(calls, scheduled)
        self.phases.split("update", seconds_of(outcomes))
        self.engine.weight_version += trains_policy
        for outcome in outcomes.values():
            self.metrics |= outcome.value
        self.guard.note(step, scheduled, self.kl.loss_coef, self.metrics)
        self.metrics |= self.kl.adapt(scheduled.batch)

    def evaluates(self, step: int) -> bool:
        """Whether a step ends with an evaluation; where a signal waits, only the last one does."""
        if step == self.config.trainer.total_steps:
            return True
        return is_due(self.config.eval.every_steps, step) and not self.preemption.is_asked

    def evaluate(self, step: int) -> None:
        """Held-out accuracy of the weights that vLLM holds."""
        with self.phases.section("evaluate"):
            self.metrics |= self.evaluator.evaluate(step, self._generate)

    def checkpoint(self, step: int) -> None:
        """Begin a checkpoint where one is due; it is written while later steps run."""
        with self.phases.section("checkpoint"):
            if is_taken := self.checkpoints.is_due(step):
                self.engine.make_room_for_moments()
            self.state.commit(step)
            self.checkpoints.step_ended()
            if is_taken:
                self.checkpoints.begin(self.state.finished())
        self.metrics["checkpoint/failed"] = float(self.checkpoints.failures)

    def log(self, step: int) -> None:
        """Hand the step's metrics over and begin anew."""
        row = self.reporter.log(step, self.metrics | self.phases.metrics())
        self.checkpoints.logged(step, row)
        self.grace.look(self.phases.timeline, self.checkpoints.write_s)
        self.metrics = {}

    def save(self) -> None:
        """Write the trained model as an ordinary HF folder."""
        if self.config.trainer.save_final_model:
            folder = self.reporter.run_dir / "final"
            # Weights that idle on the host come back to be gathered: the engine makes room.
            self.engine.sleep()
            problem = self.workers.actor.call("save", str(folder))
            self.reporter.saved(folder, self.workers.pool.hosts[0].node_name, problem)

    def _generate(self, prompts: PromptBatch) -> Rollout:
        """Responses, dealt to engines by expected length; their lengths are learned from."""
        rollout = self.answer(self.state.lengths.expect(prompts))
        self.state.lengths.learn(rollout.batch)
        return rollout


def seconds_of(outcomes: Mapping[str, TimedResult]) -> dict[str, float]:
    """How long each call took, on the rank where it took longest."""
    return {name: outcome.span.seconds for name, outcome in outcomes.items()}
