"""From the next prompts to a step's responses: sampled once, or again where nothing is learned.

Chosen once from config; the loop calls `sample` whichever it is.
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
    """A step's responses.

    Attributes:
        rollout: the responses that are trained on, those of each prompt together.
        prompts: [B] the prompt of each response.
        rewarded: their rewards, where sampling had to know them.
        metrics: of the sampling.
    """

    rollout: Rollout
    prompts: list[Prompt]
    rewarded: Rewarded | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Sampling(Protocol):
    """Samples responses while vLLM is awake."""

    def sample(self, step: int) -> Sampled:
        """data.prompts_per_step prompts and their responses."""
        ...


class PlainSampling:
    """Every prompt is sampled once.

    Args:
        config: the run.
        take: the next so many training prompts.
        generate: samples responses.
    """

    def __init__(self, config: RunConfig, take: Take, generate: Generate) -> None:
        self._config = config
        self._take = take
        self._generate = generate

    def sample(self, step: int) -> Sampled:
        """The next prompts and their responses."""
        prompts = self._take(self._config.data.prompts_per_step)
        request = request_for(self._config, prompts, step)
        return Sampled(self._generate(request), repeated(prompts, request.responses_per_prompt))


class DynamicSampling:
    """Prompts whose responses all have one reward are replaced by the next ones.

    Each round asks for exactly the prompts still missing, so that none whose responses differ is
    thrown away. Those that do not differ after the last round fill the batch without counting in
    the policy loss.

    Args:
        config: the run.
        take: the next so many training prompts.
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
        """Prompts whose responses differ, as far as the rounds suffice, and their responses."""
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
        # A prompt may come again within a step: then its samples are others.
        request = request_for(self._config, prompts, step, first_sample=index * self._each)
        rollout = self._generate(request)
        of_responses = repeated(prompts, self._each)
        rewarded = self._rewards.score(of_responses, rollout.batch)
        scores = torch.tensor(rewarded.scores).view(len(prompts), self._each)
        return _Round(rollout, of_responses, rewarded, (scores != scores[:, :1]).any(1))


class WithoutTruncated:
    """Responses that were cut off are left out of the policy loss (overlong filtering).

    Args:
        sampling: where responses come from.

    Source: Yu et al. 2025 (DAPO), section 3.4, https://arxiv.org/abs/2503.14476
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def sample(self, step: int) -> Sampled:
        """The responses, those that were cut off without a token that counts."""
        sampled = self._sampling.sample(step)
        batch = counting(sampled.rollout.batch, ~sampled.rollout.batch.truncated)
        return replace(sampled, rollout=replace(sampled.rollout, batch=batch))


@dataclass(frozen=True)
class _Round:
    """One round's responses.

    Attributes:
        rollout, prompts, rewarded: as in `Sampled`.
        is_mixed: [P] bool, whether the rewards of a prompt's responses differ.
    """

    rollout: Rollout
    prompts: list[Prompt]
    rewarded: Rewarded
    is_mixed: Tensor

    def kept(self, which: Tensor) -> Sampled:
        """The responses of some prompts, those whose rewards differ first."""
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
    """The sampling that the algorithm section asks for, with the mask of what counts in the loss.

    Whatever is computed of the batch later sees the same mask: whitening, selected tokens, loss.
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
    """Prompts to be sampled as in training."""
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
    """The prompt of each response."""
    return [prompt for prompt in prompts for _ in range(each)]


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """The responses of all rounds; groups of one prompt in two rounds stay apart."""
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
    """The batch with the responses of its last prompts left out of the policy loss."""
    if not num_unmixed:
        return batch
    counts = torch.ones(len(batch), dtype=torch.bool)
    counts[len(batch) - num_unmixed * each :] = False
    return counting(batch, counts)


def counting(batch: RolloutBatch, counts: Tensor) -> RolloutBatch:
    """The batch with the responses that do not count [B] left out of the policy loss, too."""
    mask = batch.counted.values & batch.responses.spread(counts)
    return replace(batch, loss_mask=batch.responses.like(mask))


def _over_rounds(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        tokens=sum(s.tokens for s in stats),
        seconds=sum(s.seconds for s in stats),
        first_token_s=max(s.first_token_s for s in stats),
    )
