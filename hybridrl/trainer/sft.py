"""Steps on reference answers in place of sampled ones: fine-tuning (SFT), and given answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from hybridrl.algorithms.masked import masked_mean
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import schedule
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.record import Trained
from hybridrl.trainer.scoring import Scoring
from hybridrl.trainer.teaching import teacher_fields, unsampled
from hybridrl.trainer.timing.engines import response_metrics
from hybridrl.trainer.updates import Updates


@dataclass(frozen=True)
class SFT:
    """Training on reference answers; vLLM is awake during evaluations only."""

    config: RunConfig
    prompts: PromptSource
    updates: Updates

    def train(self, step: int, pause: Callable[[], None]) -> Trained:
        """Take the optimizer steps on the next prompts' reference answers."""
        batch = reference_batch(self.prompts.take(self.config.data.prompts_per_step))
        scheduled = schedule(batch, self.updates.sizes, seed=self.config.seed, step=step)
        metrics = {**response_metrics(batch), **self.updates.update(scheduled, step)}
        return Trained(scheduled.batch, metrics)

    def held_out_nll(self, prompts: Sequence[Prompt]) -> float:
        """Compute the mean of -log p over the tokens of held-out reference answers, nats."""
        batch = reference_batch(prompts)
        log_probs = self.updates.log_probs(batch)
        return -float(masked_mean(log_probs.values, batch.response_mask.values))


@dataclass(frozen=True)
class GivenAnswers:
    """Steps on the data's reference answers, on which the policy takes the teacher's distribution.

    Source: Agarwal et al. 2024 (GKD), algorithm 1, https://arxiv.org/abs/2306.13649
    """

    config: RunConfig
    prompts: PromptSource
    scoring: Scoring
    updates: Updates

    def are_due(self, step: int) -> bool:
        """Return whether a step trains on given answers, a function of seed and step."""
        teacher = self.config.teacher
        share = 0.0 if teacher is None else teacher.given_fraction
        return Random(derive_seed(self.config.seed, "given_answers", step)).random() < share

    def train(self, step: int) -> Trained:
        """Take the optimizer steps on the reference answers of as many prompts as responses."""
        config = self.config
        prompts = self.prompts.take(
            config.data.prompts_per_step * config.rollout.responses_per_prompt
        )
        batch = reference_batch(prompts).adding(**teacher_fields(config.teacher, prompts))
        scheduled = self.scoring.of_teachers(batch, step)
        metrics = {**response_metrics(batch), **self.updates.update(scheduled, step)}
        return Trained(scheduled.batch, metrics)


def reference_batch(prompts: Sequence[Prompt]) -> RolloutBatch:
    """Return the reference answers as responses that nobody sampled, of log-prob 0."""
    read, answers = (
        Ragged.from_rows(rows, torch.int32)
        for rows in zip(*((prompt.token_ids, prompt.answer_ids) for prompt in prompts), strict=True)
    )
    return unsampled(read, answers, torch.tensor([prompt.prompt_id for prompt in prompts]))
