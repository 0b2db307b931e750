"""Steps on the data set's responses in place of sampled ones: fine-tuning (SFT), given answers.

Fine-tuning is on reference answers, or on preferences: pairs of responses, or labelled ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import torch
from torch import Tensor

from hybridrl.algorithms.masked import masked_mean
from hybridrl.config.choices import Targets
from hybridrl.config.estimators import trains_reward_model
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import image_rows
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import ScheduledBatch, schedule
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.image_tokens import processed
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.record import Row, Trained
from hybridrl.trainer.scoring import Scoring
from hybridrl.trainer.teaching import teacher_fields, unsampled
from hybridrl.trainer.timing.engines import response_metrics
from hybridrl.trainer.updates import Updates

# The schedule of the responses to a step's prompts.
Scheduled = Callable[[Sequence[Prompt], int], ScheduledBatch]


@dataclass(frozen=True)
class SFT:
    """Training on reference answers; vLLM is awake during evaluations only."""

    config: RunConfig
    prompts: PromptSource
    updates: Updates

    def train(self, step: int, pause: Callable[[], None]) -> Trained:
        """Take the optimizer steps on the next prompts' reference answers."""
        prompts = self.prompts.take(self.config.data.prompts_per_step)
        scheduled, metrics = self.inputs(prompts, step)
        metrics |= response_metrics(replace(scheduled.batch, episode=None))
        return Trained(scheduled.batch, metrics | self.updates.update(scheduled, step))

    def inputs(self, prompts: Sequence[Prompt], step: int) -> tuple[ScheduledBatch, Row]:
        """Return what the update takes, and metrics."""
        return self.scheduled(prompts, step), {}

    def scheduled(self, prompts: Sequence[Prompt], step: int) -> ScheduledBatch:
        """Return the schedule of a step's reference answers."""
        batch, seed = reference_batch(prompts), self.config.seed
        return schedule(batch, self.updates.sizes, seed=seed, step=step)

    def held_out(self, prompts: Sequence[Prompt]) -> Row:
        """Compute eval/nll: the mean of -log p over tokens of held-out reference answers, nats."""
        batch = reference_batch(prompts)
        log_probs = self.updates.log_probs(batch)
        # Own losses may compare pairs without a reference.
        mask = batch.preferred if "preferred" in batch.added else batch.response_mask
        return {"eval/nll": -float(masked_mean(log_probs.values, mask.values))}


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
    """Return the reference answers as responses that nobody sampled, of log-prob 0.

    The two of a preference pair are one episode. `preferred` is added to preference data.
    """
    rows = [(prompt, *one) for prompt in prompts for one in prompt.responses]
    read = Ragged.from_rows([prompt.token_ids for prompt, _, _ in rows], torch.int32)
    responses = Ragged.from_rows([ids for _, ids, _ in rows], torch.int32)
    ids = torch.tensor([prompt.prompt_id for prompt, _, _ in rows])
    images = image_rows(processed(prompt.images for prompt, _, _ in rows))
    batch = replace(unsampled(read, responses, ids), images=images)
    if len(rows) > len(prompts):
        batch = replace(batch, episode=torch.arange(len(prompts)).repeat_interleave(2))
    elif all(prompt.is_desired is None for prompt in prompts):
        return batch
    preferred = torch.tensor([is_preferred for _, _, is_preferred in rows])
    return batch.adding(preferred=responses.like(responses.spread(preferred)))


class ReferenceLogProbs:
    """The frozen reference's log-probs of the data set's responses, each computed once.

    That is in the step that first draws the prompt, in the micro-batches of that step's update: so
    the first margin is exactly 0. A resumed run repeats the passes of those earlier steps that it
    needs, and gets equal log-probs.

    Args:
        ref: the role.
        prompts: their order in training, `per_step` in each step.
    """

    def __init__(self, ref: WorkerGroup, prompts: PromptSource, per_step: int) -> None:
        self._ref, self._order, self._per_step = ref, prompts.from_start(), per_step
        # Prompts of each step so far, and the step that first drew a prompt.
        self._steps: list[Sequence[Prompt]] = []
        self._first: dict[int, int] = {}
        self._known: dict[int, list[Tensor]] = {}  # by prompt, of each response

    def of_step(self, step: int, prompts: Sequence[Prompt], scheduled: Scheduled) -> Ragged:
        """Return the log-probs of a step's responses, whose rows are as in `scheduled`."""
        while len(self._steps) < step:
            drawn: Sequence[Prompt] = list(islice(self._order, self._per_step))
            self._steps.append(prompts if len(self._steps) + 1 == step else drawn)
            for prompt in self._steps[-1]:
                self._first.setdefault(prompt.prompt_id, len(self._steps))
        unknown = {self._first[p.prompt_id] for p in prompts if p.prompt_id not in self._known}
        for first in sorted(unknown):
            drawn = self._steps[first - 1]
            self._keep(drawn, self._ref.call("compute_log_probs", scheduled(drawn, first)))
        return self._kept(prompts)

    def of_held_out(self, prompts: Sequence[Prompt], updates: Updates) -> Ragged:
        """Return the log-probs of the responses to held-out prompts, always the same ones."""
        if prompts[0].prompt_id not in self._known:
            self._keep(prompts, updates.log_probs(reference_batch(prompts), self._ref))
        return self._kept(prompts)

    def _keep(self, prompts: Sequence[Prompt], values: Ragged) -> None:
        rows, each = values.rows(), len(values) // len(prompts)
        for index, prompt in enumerate(prompts):
            own = rows[index * each : (index + 1) * each]
            self._known.setdefault(prompt.prompt_id, own)

    def _kept(self, prompts: Sequence[Prompt]) -> Ragged:
        rows = [row for prompt in prompts for row in self._known[prompt.prompt_id]]
        return Ragged.from_rows(rows, torch.float32)


@dataclass(frozen=True)
class Preferences(SFT):
    """Training on pairs or labelled responses, compared with the frozen reference.

    Attributes:
        reference: log-probs of the responses.
        mismatched: of labelled ones, log-probs of responses to other prompts, for `kl_baseline`.
    """

    reference: ReferenceLogProbs
    mismatched: ReferenceLogProbs | None

    def inputs(self, prompts: Sequence[Prompt], step: int) -> tuple[ScheduledBatch, Row]:
        """Return the responses with the reference's log-probs and, of labels, the baseline."""
        own, metrics = self.scheduled(prompts, step), Row()
        with self.updates.phases.section("ref_log_probs"):
            ref = self.reference.of_step(step, prompts, _but(step, own, self.scheduled))
            fields = {"ref_log_probs": ref}
            if self.mismatched is not None:
                kl = self._kl_baseline(self.mismatched, prompts, step)
                fields["kl_baseline"] = ref.like(torch.full_like(ref.values, kl))
                metrics["actor/kl_baseline"] = kl
        return own.adding(**fields), metrics

    def _kl_baseline(
        self, reference: ReferenceLogProbs, prompts: Sequence[Prompt], step: int
    ) -> float:
        """Estimate the policy's KL against the reference from responses to other prompts, >= 0.

        It is of the weights before the step's updates, and the same on all micro-batches.
        """
        whole = self._of_others(prompts, step)
        policy: Ragged = self.updates.workers.actor.call("compute_log_probs", whole)
        ref = reference.of_step(step, prompts, _but(step, whole, self._of_others))
        total = (policy.values.double() - ref.values.double()).sum()
        return max(0.0, float(total) / len(prompts))

    def _of_others(self, prompts: Sequence[Prompt], step: int) -> ScheduledBatch:
        """Return the schedule of responses to other prompts, each one's next in the data."""
        others = [replace(p, answer_ids=self.prompts.after(p).answer_ids) for p in prompts]
        return self.scheduled(others, step)

    def held_out(self, prompts: Sequence[Prompt]) -> Row:
        """Compute eval/nll of preferred responses, nats a token, and eval/preference_accuracy.

        That is the share of pairs whose better response has gained more than the other.
        """
        batch = reference_batch(prompts)
        log_probs = self.updates.log_probs(batch)
        ref = self.reference.of_held_out(prompts, self.updates)
        metrics: Row = {"eval/nll": None}
        if batch.preferred.values.any():
            metrics["eval/nll"] = -float(masked_mean(log_probs.values, batch.preferred.values))
        if batch.episode is not None:
            ratios = log_probs.like(log_probs.values.double() - ref.values.double())
            sums = _sums(ratios)
            if self.config.algorithm.loss.function == "ipo":  # which compares means over tokens
                sums /= ratios.lengths
            metrics["eval/preference_accuracy"] = _preference_accuracy(sums)
        return metrics


class RewardModels(SFT):
    """Training of a reward model on pairs; the policy stays as it is."""

    def held_out(self, prompts: Sequence[Prompt]) -> Row:
        """Compute eval/preference_accuracy: the share of pairs whose better response scores more.

        A score is on a response's last token, 0 on the others.
        """
        scores = self.updates.scores(reference_batch(prompts))
        return {"eval/preference_accuracy": _preference_accuracy(_sums(scores))}


def _sums(values: Ragged) -> Tensor:
    """Return [B], the sums of rows."""
    return torch.stack([row.sum() for row in values.rows()])


def _preference_accuracy(responses: Tensor) -> float:
    """Return the share of pairs whose better response, the first, has more; `responses` is [2P]."""
    better, worse = responses.view(-1, 2).unbind(1)
    return float((better > worse).double().mean())


def _but(step: int, own: ScheduledBatch, scheduled: Scheduled) -> Scheduled:
    """Return `scheduled`, but of `step` the schedule `own`, which the ranks have already."""
    return lambda prompts, other: own if other == step else scheduled(prompts, other)


def supervised(config: RunConfig, prompts: PromptSource, updates: Updates) -> SFT:
    """Return the training on what the run's loss takes."""
    if trains_reward_model(config):
        return RewardModels(config, prompts, updates)
    targets, ref = targets_of(config), updates.workers.ref
    if targets is Targets.answers or ref is None:
        return SFT(config, prompts, updates)
    own, others = (ReferenceLogProbs(ref, prompts, config.data.prompts_per_step) for _ in range(2))
    return Preferences(config, prompts, updates, own, others if targets is Targets.labels else None)
