"""Phase score: forward passes of all roles, and meanwhile the rewards of the responses."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.choices import TeacherTokenizer
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import Call, Workers, begin_together
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, UpdateSizes, schedule
from hybridrl.trainer.episodes.turn_rewards import with_turn_rewards
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.mismatch import adapter_share, check_rollout_log_probs, current_tokens
from hybridrl.trainer.record import Observer, Responses, Row, Scored
from hybridrl.trainer.rewarding import (
    Rewarded,
    RewardSource,
    add_model_scores,
    baseline_rewards,
    mixed_fraction,
    outcome_metrics,
    outcome_on_last_token,
    overlong_shaping,
)
from hybridrl.trainer.sampling.source import Sampled
from hybridrl.trainer.teaching import OtherTokens, check_teachers, teacher_fields
from hybridrl.trainer.timing.phases import Phases

# Forward passes, on the roles that the run has: field of the batch -> role, method.
FORWARDS = {
    "old_log_probs": ("actor", "compute_log_probs"),
    "ref_log_probs": ("ref", "compute_log_probs"),
    "values": ("critic", "compute_values"),
    "model_scores": ("reward_model", "compute_scores"),
    "teacher_log_probs": ("teacher", "compute_log_probs"),
}
TAUGHT = "teacher_log_probs"


class Scoring:
    """Scoring of a step's responses.

    Args:
        place: describes the ranks of a rollout engine.
        observer: gets the responses with their rewards, before the update.
    """

    def __init__(
        self,
        config: RunConfig,
        workers: Workers,
        rewards: RewardSource,
        sizes: UpdateSizes,
        phases: Phases,
        place: Callable[[int], str],
        observer: Observer,
    ) -> None:
        self._config = config
        self._rewards = rewards
        self._sizes = sizes
        self._phases = phases
        self._place = place
        self._observer = observer
        self._calls = {
            name: Call(group, method)
            for name, (role, method) in FORWARDS.items()
            if (group := getattr(workers, role)) is not None
        }
        self._teachers = {name: self._calls[name] for name in (TAUGHT,) if name in self._calls}
        teacher, self._other_tokens = config.teacher, None
        if teacher is not None and teacher.tokenizer is TeacherTokenizer.own:
            self._other_tokens = OtherTokens(config)
            del self._calls[TAUGHT]
        if config.rollout.exact:  # those of the rollout are the actor's
            del self._calls["old_log_probs"]

    def score(self, sampled: Sampled, step: int, weight_version: int) -> Scored:
        """Draw the mini-batches, then add old_log_probs, ref_log_probs, values and scores.

        The forward passes use the micro-batches of the first update epoch, so that the policy
        ratio there is 1. Rewards are computed meanwhile. With rollout.exact, old_log_probs are
        rollout_log_probs.

        Args:
            sampled: responses of the step.
            step: training step.
            weight_version: number of the actor's weights.

        Raises:
            RunStopped: all rewards failed, no token is trained, or vLLM's log-probs are those of
                other weights.
        """
        batch, seed = sampled.batch, self._config.seed
        batch = batch.adding(**teacher_fields(self._config.teacher, sampled.prompts))
        with self._phases.section("score"):
            scheduled = schedule(batch, self._sizes, seed=seed, step=step)
            forwards = begin_together(self._calls, scheduled)
            rewarded, baseline, metrics = self._reward(sampled)
            outcomes = forwards()
            fields: dict[str, Any] = {name: outcome.value for name, outcome in outcomes.items()}
            if (model := self._config.reward_model) is not None:
                scores = fields.pop("model_scores")
                rewarded, of_model = add_model_scores(rewarded, batch, scores, model.weight)
                metrics |= of_model
            responses = Responses(sampled.prompts, batch, rewarded)
            scores, of_scores = self._token_scores(responses, step)
            keep_kv = self._config.rollout.keep_kv
            current = current_tokens(batch, weight_version, keep_kv=keep_kv)
            if self._config.rollout.exact:
                fields["old_log_probs"] = batch.rollout_log_probs
                fields["current"] = batch.responses.like(current)
            if self._other_tokens is not None:
                read, spans = self._other_tokens.read(batch)
                other = schedule(read, self._sizes, seed=seed, step=step)
                outcomes |= begin_together(self._teachers, other)()
                of_teacher, old = outcomes[TAUGHT].value, fields["old_log_probs"]
                fields[TAUGHT] = self._other_tokens.spread(old, spans, of_teacher)
            batch = scheduled.batch.adding(scores=scores, **baseline)
            scheduled = replace(scheduled, batch=batch).adding(**fields)
        self._phases.split("score", outcomes)
        metrics |= of_scores | self._mismatch(scheduled, current)
        return Scored(responses, scheduled, metrics)

    def of_teachers(self, batch: RolloutBatch, step: int) -> ScheduledBatch:
        """Draw the mini-batches of given answers, and add teacher_log_probs."""
        with self._phases.section("score"):
            scheduled = schedule(batch, self._sizes, seed=self._config.seed, step=step)
            outcomes = begin_together(self._teachers, scheduled)()
        self._phases.split("score", outcomes)
        scheduled = scheduled.adding(teacher_log_probs=outcomes[TAUGHT].value)
        check_teachers(scheduled.batch, step)
        return scheduled

    def _reward(self, sampled: Sampled) -> tuple[Rewarded, dict[str, Tensor], Row]:
        """Score the responses and, for baseline_rewards, the greedy ones."""
        start = time.perf_counter()
        rewarded = sampled.rewarded or self._rewards.score(sampled.prompts, sampled.batch)
        baseline: dict[str, Tensor] = {}
        if (greedy := sampled.greedy) is not None:
            of_greedy = baseline_rewards(self._config, self._rewards, sampled.prompts, greedy)
            baseline = {"baseline_rewards": of_greedy}
        metrics: Row = {
            **rewarded.part_metrics(),
            "reward/seconds": time.perf_counter() - start,
            "reward/failed": float(len(rewarded.failures)),
        }
        return rewarded, baseline, metrics

    def _token_scores(self, responses: Responses, step: int) -> tuple[Ragged, Row]:
        """Place outcome rewards on the last tokens of episodes, rewards of turns on theirs."""
        prompts, batch, rewarded = responses.prompts, responses.batch, responses.rewarded
        episodes, last = batch.by_episode(), batch.last_of_episodes
        penalty = overlong_shaping(self._config, episodes.responses.lengths)
        outcome = torch.tensor(rewarded.scores)[last] + penalty
        metrics: Row = {
            **outcome_metrics([prompts[row] for row in last.tolist()], outcome, penalty),
            **mixed_fraction(outcome, self._config.rollout.responses_per_prompt),
        }
        self._observer.scored(step, responses)
        rewarded.stop_if_all_failed(step, len(last))
        if not bool(batch.response_mask.values.any()):
            raise RunStopped(
                f"step {step}: no token is trained. The programs sampled nothing, or only what "
                f"agent.other_sampling=mask leaves out."
            )
        scores = outcome_on_last_token(outcome, episodes)
        if "turn_rewards" in episodes.added:
            scores = with_turn_rewards(scores, episodes)
        return batch.responses.like(scores.values), metrics

    def _mismatch(self, scheduled: ScheduledBatch, mask: Tensor) -> Row:
        """Compare log-probs on `mask`, [N] bool; stop the run if vLLM's weights are stale."""
        batch, limit = scheduled.batch, self._config.trainer.max_log_prob_diff
        assert limit is not None, "derived"
        metrics = check_rollout_log_probs(batch, mask, limit=limit, where=self._place)
        if self._config.lora is not None:
            metrics |= adapter_share(batch, mask)
        return metrics
