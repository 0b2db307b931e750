"""PPO training loop, in the order of its phases.

    reshard     actor FSDP shards -> vLLM TP slices, in place
    rollout     prompts -> responses, rollout_log_probs
    forward     old_log_probs, ref_log_probs, values, model scores; meanwhile rewards -> scores
    advantage   rewards -> advantages, returns
    update      critic and actor, packed micro-batches
    log, evaluate, checkpoint

What all kinds of training share, fit and step included, is in loop.py.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import Call, Workers, begin_together
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule
from hybridrl.trainer.advantage import AdvantageEstimator, LossInputs, value_metrics
from hybridrl.trainer.agents.turn_rewards import with_turn_rewards
from hybridrl.trainer.callbacks import call_each
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.health.measures import token_details
from hybridrl.trainer.loop import TrainingLoop
from hybridrl.trainer.mismatch import adapter_share, check_rollout_log_probs, current_tokens
from hybridrl.trainer.rewarding import (
    Rewarded,
    add_model_scores,
    baseline_rewards,
    mixed_fraction,
    outcome_metrics,
    outcome_on_last_token,
    overlong_shaping,
)
from hybridrl.trainer.sampling.source import Sampled
from hybridrl.trainer.timing.engines import engine_place, rollout_metrics, straddling
from hybridrl.trainer.tracking.token_log import pick_rows

# Calls of the forward phase, on the roles that the run has: field of the batch -> role, method.
FORWARDS = {
    "old_log_probs": ("actor", "compute_log_probs"),
    "ref_log_probs": ("ref", "compute_log_probs"),
    "values": ("critic", "compute_values"),
    "model_scores": ("reward_model", "compute_scores"),
}


class PPOTrainer(TrainingLoop):
    """PPO and its relatives: a step's training; one short method per phase."""

    def __init__(self, config: RunConfig, workers: Workers, *parts: Any, **more: Any) -> None:
        super().__init__(config, workers, *parts, **more)
        self.estimator = AdvantageEstimator(config.algorithm)
        self.loss_inputs = LossInputs(config.algorithm, config.seed)
        self.engine_place = partial(engine_place, workers.rollout)
        self.reporter.health.place = self.engine_place

    def train(self, step: int) -> None:
        """Sample and train."""
        self.reshard()
        sampled = self.rollout(step)
        self.pause()
        scheduled = self.forward(sampled, step)
        scheduled = self.advantage(scheduled, step)
        self.pause()
        self.update(scheduled, step)
        self.metrics |= self.source.after_update(step)
        batch, reporter = scheduled.batch, self.reporter
        updated = partial(self.forward_any, "compute_token_stats", batch)
        reporter.details |= token_details(batch, updated, reporter.decode_all)
        if self.reporter.is_recorded(step):
            with self.phases.section("record"):
                self.record(scheduled.batch, step)

    def record(self, batch: RolloutBatch, step: int) -> None:
        """Store the tokens of some responses, with log-probs after the updates."""
        assert self.scored is not None
        self.reporter.log_advantages(step, batch)
        if count := self.config.tracking.token_samples:
            rows = pick_rows(batch, self.scored[2].scores, count)
            chosen, trained = batch.select(rows), self.trains_policy(step)
            updated = self.forward_any("compute_token_stats", chosen)
            self.reporter.log_tokens(step, rows, chosen, updated, trained=trained)

    def rollout(self, step: int) -> Sampled:
        """Sample responses to the next prompts; then put vLLM to sleep."""
        with self.phases.section("rollout"):
            sampled = self.source.take(step)
            self.engine.sleep()
        seconds, switch_s = self.phases.seconds("rollout"), self.phases.switch_s
        self.metrics |= sampled.metrics | rollout_metrics(sampled.batch, seconds, switch_s)
        self.metrics["rollout/straddling_engines"] = straddling(self.workers.rollout)
        self.metrics |= self.reporter.health.measures(sampled.batch)
        return sampled

    def reward(self, sampled: Sampled) -> tuple[Rewarded, Tensor | None]:
        """Score the responses and, with a greedy baseline, the greedy ones."""
        batch, start = sampled.batch, time.perf_counter()
        rewarded = sampled.rewarded or self.rewards.score(sampled.prompts, batch)
        baseline = None
        if sampled.greedy is not None:
            baseline = baseline_rewards(self.config, self.rewards, sampled.prompts, sampled.greedy)
        self.metrics |= rewarded.part_metrics() | {
            "reward/seconds": time.perf_counter() - start,
            "reward/failed": float(len(rewarded.failures)),
        }
        return rewarded, baseline

    def token_scores(self, sampled: Sampled, rewarded: Rewarded, step: int) -> Ragged:
        """Place outcome rewards on the last tokens of episodes, rewards of turns on theirs."""
        episodes, last = sampled.batch.by_episode(), sampled.batch.last_of_episodes
        penalty = overlong_shaping(self.config, episodes.responses.lengths)
        outcome = torch.tensor(rewarded.scores)[last] + penalty
        prompts = [sampled.prompts[row] for row in last.tolist()]
        self.metrics |= outcome_metrics(prompts, outcome, penalty)
        self.metrics |= mixed_fraction(outcome, self.config.rollout.responses_per_prompt)
        self.reporter.log_responses(step, sampled.prompts, sampled.batch, rewarded)
        rewarded.stop_if_all_failed(step, len(last))
        if not bool(sampled.batch.response_mask.values.any()):
            raise RunStopped(
                f"step {step}: no token is trained. The programs sampled nothing, or only what "
                f"agent.other_sampling=mask leaves out."
            )
        self.scored = sampled.prompts, sampled.batch, rewarded
        if self.callbacks:
            call_each(self.callbacks, "on_samples", self, step, self.samples)
        scores = outcome_on_last_token(outcome, episodes)
        if episodes.turn_rewards is not None:
            scores = with_turn_rewards(scores, episodes)
        return sampled.batch.responses.like(scores.values)

    def forward(self, sampled: Sampled, step: int) -> ScheduledBatch:
        """Draw the mini-batches, then add old_log_probs, ref_log_probs, values and scores.

        The forward passes use the micro-batches of the first update epoch, so that the policy
        ratio there is 1. Rewards are computed meanwhile.
        """
        calls = {
            name: Call(group, method)
            for name, (role, method) in FORWARDS.items()
            if (group := getattr(self.workers, role)) is not None
        }
        batch, seed = sampled.batch, self.config.seed
        with self.phases.section("score"):  # the phase's name in metrics
            scheduled = schedule(batch, self.sizes, seed=seed, step=step)
            results = begin_together(calls, scheduled)
            rewarded, baseline = self.reward(sampled)
            outcomes = results()
            found = {name: outcome.value for name, outcome in outcomes.items()}
            if self.workers.reward_model is not None:
                weight, scores = self.config.reward_model.weight, found.pop("model_scores")
                rewarded, metrics = add_model_scores(rewarded, batch, scores, weight)
                self.metrics |= metrics
            scores = self.token_scores(sampled, rewarded, step)
            scored = replace(batch, scores=scores, baseline_rewards=baseline)
            scheduled = scheduled.keeping(scored).adding(**found)
        self.phases.split("score", outcomes)
        top_p, keep_kv = self.config.rollout.top_p, self.config.rollout.keep_kv
        limit = self.config.trainer.max_log_prob_diff
        assert limit is not None
        compared = current_tokens(scheduled.batch, self.engine.weight_version, keep_kv=keep_kv)
        self.metrics |= check_rollout_log_probs(
            scheduled.batch,
            compared,
            top_p=top_p,
            limit=limit,
            where=self.engine_place,
        )
        if self.config.lora is not None:
            self.metrics |= adapter_share(scheduled.batch, compared, top_p=top_p)
        return scheduled

    def advantage(self, scheduled: ScheduledBatch, step: int) -> ScheduledBatch:
        """Compute rewards with KL penalty, then advantages, returns and further loss inputs."""
        with self.phases.section("advantage"):
            rewards = self.kl.rewards(scheduled.batch)
            scheduled = scheduled.adding(**self.estimator.estimate(scheduled.batch, rewards))
            fields, metrics = self.loss_inputs.of_step(scheduled.batch, step)
            scheduled = scheduled.adding(**fields) if fields else scheduled
        self.metrics |= metrics
        if self.workers.critic is not None:
            self.metrics |= value_metrics(scheduled.batch)
        return scheduled
