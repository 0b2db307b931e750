"""Sampling of a step's responses: one round, or dynamic sampling (DAPO).

The implementation is chosen once, by `sampling_for`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import EngineStats, Generate, PromptBatch, Rollout, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import Rewarded, RewardSource

Take = Callable[[int], list[Prompt]]


@dataclass(frozen=True)
class Sampled:
    """Responses of a step.

    Attributes:
        rollout: responses to train on, those of each prompt together.
        prompts: [B] the prompt of each response.
        rewarded: their rewards, if sampling needed them.
        metrics: of the sampling.
    """

    rollout: Rollout
    prompts: list[Prompt]
    rewarded: Rewarded | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Sampling(Protocol):
    """Source of a step's responses."""

    def sample(self, step: int) -> Sampled:
        """Sample responses to data.prompts_per_step prompts, while vLLM is awake."""
        ...


class PlainSampling:
    """Sampling in one round.

    Args:
        config: the run.
        take: returns the next n training prompts.
        generate: samples responses.
    """

    def __init__(self, config: RunConfig, take: Take, generate: Generate) -> None:
        self._config = config
        self._take = take
        self._generate = generate

    def sample(self, step: int) -> Sampled:
        """Sample responses to the next prompts."""
        prompts = self._take(self._config.data.prompts_per_step)
        request = request_for(self._config, prompts, step)
        return Sampled(self._generate(request), repeated(prompts, request.responses_per_prompt))


class DynamicSampling:
    """Dynamic sampling: prompts whose responses have equal rewards are replaced by the next.

    Each round samples exactly the missing prompts, so that no mixed prompt is thrown away.
    Unmixed prompts of the last round fill the batch; they do not count in the policy loss.

    Args:
        config: the run.
        take: returns the next n training prompts.
        generate: samples responses.
        rewards: scores them.

    Source: Yu et al. 2025 (DAPO), section 3.2, https://arxiv.org/abs/2503.14476
    """

    def __init__(
        self, config: RunConfig, take: Take, generate: Generate, rewards: RewardSource
    ) -> None:
        self._config = config
        self._take = take
        self._generate = generate
        self._rewards = rewards

    def sample(self, step: int) -> Sampled:
        """Sample mixed prompts, up to algorithm.max_sampling_rounds rounds."""
        wanted = self._config.data.prompts_per_step
        last = self._config.algorithm.max_sampling_rounds - 1
        rounds: list[_Round] = []
        missing = wanted
        while missing and len(rounds) <= last:
            rounds.append(self._round(self._take(missing), step, len(rounds)))
            missing -= int(rounds[-1].is_mixed.sum())
        parts = [done.kept(done.is_mixed) for done in rounds[:-1]]
        parts.append(rounds[-1].kept(torch.ones_like(rounds[-1].is_mixed)))
        sampled = _joined(parts)
        counts = _mixed_tokens(sampled.rollout.batch, missing, self._each)
        num_prompts = sum(len(done.is_mixed) for done in rounds)
        metrics = {
            "sampling/rounds": float(len(rounds)),
            "sampling/prompts": float(num_prompts),
            "sampling/mixed_fraction": (wanted - missing) / num_prompts,
            "sampling/unmixed_prompts": float(missing),
            "sampling/reward_mean": fmean([s for done in rounds for s in done.rewarded.scores]),
        }
        rollout = replace(sampled.rollout, batch=counts)
        return replace(sampled, rollout=rollout, metrics=metrics)

    @property
    def _each(self) -> int:
        return self._config.rollout.responses_per_prompt

    def _round(self, prompts: list[Prompt], step: int, index: int) -> "_Round":
        # A prompt may return within a step; first_sample makes its samples differ.
        request = request_for(self._config, prompts, step, first_sample=index * self._each)
        rollout = self._generate(request)
        of_responses = repeated(prompts, self._each)
        rewarded = self._rewards.score(of_responses, rollout.batch)
        scores = torch.tensor(rewarded.scores).view(len(prompts), self._each)
        return _Round(rollout, of_responses, rewarded, (scores != scores[:, :1]).any(1))


class WithoutTruncated:
    """Overlong filtering: truncated responses do not count in the policy loss.

    Args:
        sampling: source of the responses.

    Source: Yu et al. 2025 (DAPO), section 3.4, https://arxiv.org/abs/2503.14476
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def sample(self, step: int) -> Sampled:
        """Sample responses; the loss mask of truncated ones is false."""
        sampled = self._sampling.sample(step)
        batch = counting(sampled.rollout.batch, ~sampled.rollout.batch.truncated)
        return replace(sampled, rollout=replace(sampled.rollout, batch=batch))


@dataclass(frozen=True)
class _Round:
    """Responses of one round.

    Attributes:
        rollout, prompts, rewarded: as in `Sampled`.
        is_mixed: [P] bool, rewards of the prompt's responses differ.
    """

    rollout: Rollout
    prompts: list[Prompt]
    rewarded: Rewarded
    is_mixed: Tensor

    def kept(self, which: Tensor) -> Sampled:
        """Select the responses of some prompts, mixed prompts first."""
        order = [i for i in (~self.is_mixed).long().argsort(stable=True).tolist() if which[i]]
        each = len(self.prompts) // len(self.is_mixed)
        rows = [prompt * each + sample for prompt in order for sample in range(each)]
        return Sampled(
            replace(self.rollout, batch=self.rollout.batch.select(rows)),
            [self.prompts[row] for row in rows],
            self.rewarded.select(rows),
        )


def sampling_for(
    config: RunConfig, take: Take, generate: Generate, rewards: RewardSource
) -> Sampling:
    """Build the sampling of the algorithm section.

    It sets the loss mask, which whitening, selected tokens and the loss share.
    """
    sampling: Sampling = PlainSampling(config, take, generate)
    if config.algorithm.max_sampling_rounds > 1:
        sampling = DynamicSampling(config, take, generate, rewards)
    if config.algorithm.overlong.train_on_truncated:
        return sampling
    return WithoutTruncated(sampling)


def request_for(
    config: RunConfig, prompts: Sequence[Prompt], step: int, first_sample: int = 0
) -> PromptBatch:
    """Build a request with the sampling parameters of training."""
    return PromptBatch(
        prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts], torch.int32),
        prompt_id=torch.tensor([prompt.prompt_id for prompt in prompts]),
        step=step,
        responses_per_prompt=config.rollout.responses_per_prompt,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        first_sample=torch.full((len(prompts),), first_sample),
    )


def repeated(prompts: Sequence[Prompt], each: int) -> list[Prompt]:
    """Return the prompt of each response."""
    return [prompt for prompt in prompts for _ in range(each)]


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Join the rounds; groups of one prompt in two rounds stay separate."""
    batch = RolloutBatch.concat([part.rollout.batch for part in parts])
    prompts = [prompt for part in parts for prompt in part.prompts]
    starts = torch.tensor([0, *(len(part.prompts) for part in parts)]).cumsum(0)
    rounds = torch.arange(len(parts)).repeat_interleave(starts.diff())
    group_id = batch.group_id + rounds * (int(batch.group_id.max()) + 1)
    engines = [
        _over_rounds(of_engine)
        for of_engine in zip(*(p.rollout.engines for p in parts), strict=True)
    ]
    rewarded = [part.rewarded for part in parts if part.rewarded is not None]
    return Sampled(
        Rollout(
            replace(batch, group_id=group_id),
            tuple(engines),
            environment_s=sum(part.rollout.environment_s for part in parts),
        ),
        prompts,
        Rewarded.concat(rewarded),
    )


def _mixed_tokens(batch: RolloutBatch, num_unmixed: int, each: int) -> RolloutBatch:
    """Exclude the responses of the last prompts from the policy loss."""
    if not num_unmixed:
        return batch
    counts = torch.ones(len(batch), dtype=torch.bool)
    counts[len(batch) - num_unmixed * each :] = False
    return counting(batch, counts)


def counting(batch: RolloutBatch, counts: Tensor) -> RolloutBatch:
    """Exclude responses that do not count ([B] bool) from the policy loss, too."""
    mask = batch.counted.values & batch.responses.spread(counts)
    return replace(batch, loss_mask=batch.responses.like(mask))


def _over_rounds(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        tokens=sum(s.tokens for s in stats),
        seconds=sum(s.seconds for s in stats),
        first_token_s=max(s.first_token_s for s in stats),
    )
