"""Sampling of a step's responses: one round, or dynamic sampling (DAPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from hybridrl.config.estimators import estimator_of
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import EngineStats, Generate, PromptBatch, Rollout, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import Rewarded, RewardSource


@dataclass(frozen=True)
class Sampled:
    """Responses of a step.

    Attributes:
        rollout: responses to train on, those of each prompt together.
        prompts: [B] the prompt of each response.
        rewarded: their rewards, if sampling needed them.
        metrics: of the sampling.
        greedy: one greedy response to each prompt, if the advantage estimator needs them.
    """

    rollout: Rollout
    prompts: list[Prompt]
    rewarded: Rewarded | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: RolloutBatch | None = None


class Sampling:
    """Sampling of responses as the algorithm section says.

    It sets the loss mask, which whitening, selected tokens and the loss share.

    Args:
        config: the run.
        take: returns the next n training prompts.
        generate: samples responses.
        rewards: scores them.
    """

    def __init__(
        self,
        config: RunConfig,
        take: Callable[[int], list[Prompt]],
        generate: Generate,
        rewards: RewardSource,
    ) -> None:
        self._config = config
        self._take = take
        self._generate = generate
        self._rewards = rewards
        self._each = config.rollout.responses_per_prompt

    def sample(self, step: int) -> Sampled:
        """Sample responses to data.prompts_per_step prompts, while vLLM is awake."""
        algorithm = self._config.algorithm
        if algorithm.max_sampling_rounds > 1:
            sampled = self._sample_mixed(step)
        else:
            sampled = self._round(self._take(self._config.data.prompts_per_step), step)
        if not algorithm.overlong.train_on_truncated:
            # Overlong filtering: Yu et al. 2025 (DAPO), section 3.4.
            sampled = counting(sampled, ~sampled.rollout.batch.truncated)
        if estimator_of(algorithm.advantage).needs_greedy_responses:
            asked = sampled.prompts[:: self._each]
            greedy = self._generate(request_of(asked, step, temperature=0.0, top_p=1.0))
            sampled = replace(sampled, greedy=greedy.batch)
        return sampled

    def _sample_mixed(self, step: int) -> Sampled:
        """Dynamic sampling: replace prompts whose responses have equal rewards by the next.

        Each round samples exactly the missing prompts, so that no mixed prompt is thrown away.
        Unmixed prompts of the last round fill the batch; they do not count in the policy loss.

        Source: Yu et al. 2025 (DAPO), section 3.2, https://arxiv.org/abs/2503.14476
        """
        wanted = missing = self._config.data.prompts_per_step
        kept: list[Sampled] = []
        scores: list[float] = []
        while missing and len(kept) < self._config.algorithm.max_sampling_rounds:
            done = self._round(self._take(missing), step, first_sample=len(kept) * self._each)
            rewarded = self._rewards.score(done.prompts, done.rollout.batch)
            scores += rewarded.scores
            of_prompts = torch.tensor(rewarded.scores).view(missing, self._each)
            is_mixed = (of_prompts != of_prompts[:, :1]).any(1)
            missing -= int(is_mixed.sum())
            is_last = not missing or len(kept) + 1 == self._config.algorithm.max_sampling_rounds
            order = (~is_mixed).long().argsort(stable=True)
            order = order if is_last else order[: int(is_mixed.sum())]
            rows = (order[:, None] * self._each + torch.arange(self._each)).flatten().tolist()
            kept.append(_selected(replace(done, rewarded=rewarded), rows))
        num_prompts = len(scores) // self._each
        metrics = {
            "sampling/rounds": float(len(kept)),
            "sampling/prompts": float(num_prompts),
            "sampling/mixed_fraction": (wanted - missing) / num_prompts,
            "sampling/unmixed_prompts": float(missing),
            "sampling/reward_mean": fmean(scores),
        }
        sampled = replace(_joined(kept), metrics=metrics)
        if missing:
            is_counted = torch.arange(len(sampled.prompts)) < (wanted - missing) * self._each
            sampled = counting(sampled, is_counted)
        return sampled

    def _round(self, prompts: list[Prompt], step: int, first_sample: int = 0) -> Sampled:
        """Sample once; a prompt may return within a step: first_sample makes its samples differ."""
        request = request_of(
            prompts,
            step,
            temperature=self._config.rollout.temperature,
            top_p=self._config.rollout.top_p,
            samples=self._each,
            first_sample=first_sample,
        )
        of_responses = [prompt for prompt in prompts for _ in range(self._each)]
        return Sampled(self._generate(request), of_responses)


def request_of(
    prompts: Sequence[Prompt],
    step: int,
    *,
    temperature: float,
    top_p: float,
    samples: int = 1,
    first_sample: int = 0,
) -> PromptBatch:
    """Build a request for responses.

    Args:
        prompts: each is sampled from.
        step: of the weights.
        temperature, top_p: how to sample; temperature 0 decodes greedily.
        samples: of each prompt.
        first_sample: samples of each prompt that exist already; seeds derive from it.
    """
    return PromptBatch(
        prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts], torch.int32),
        prompt_id=torch.tensor([prompt.prompt_id for prompt in prompts]),
        step=step,
        responses_per_prompt=samples,
        temperature=temperature,
        top_p=top_p,
        first_sample=torch.full((len(prompts),), first_sample),
    )


def counting(sampled: Sampled, counts: Tensor) -> Sampled:
    """Exclude responses that do not count ([B] bool) from the policy loss, too."""
    batch = sampled.rollout.batch
    mask = batch.counted.values & batch.responses.spread(counts)
    batch = replace(batch, loss_mask=batch.responses.like(mask))
    return replace(sampled, rollout=replace(sampled.rollout, batch=batch))


def _selected(sampled: Sampled, rows: list[int]) -> Sampled:
    """Select responses of one round."""
    assert sampled.rewarded is not None
    return Sampled(
        replace(sampled.rollout, batch=sampled.rollout.batch.select(rows)),
        [sampled.prompts[row] for row in rows],
        sampled.rewarded.select(rows),
    )


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Join the rounds; groups of one prompt in two rounds stay separate."""
    batch = RolloutBatch.concat([part.rollout.batch for part in parts])
    sizes = torch.tensor([len(part.prompts) for part in parts])
    rounds = torch.arange(len(parts)).repeat_interleave(sizes)
    group_id = batch.group_id + rounds * (int(batch.group_id.max()) + 1)
    engines = zip(*(part.rollout.engines for part in parts), strict=True)
    return Sampled(
        Rollout(
            replace(batch, group_id=group_id),
            tuple(map(_over_rounds, engines)),
            environment_s=sum(part.rollout.environment_s for part in parts),
        ),
        [prompt for part in parts for prompt in part.prompts],
        Rewarded.concat([part.rewarded for part in parts if part.rewarded is not None]),
    )


def _over_rounds(stats: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        tokens=sum(s.tokens for s in stats),
        seconds=sum(s.seconds for s in stats),
        first_token_s=max(s.first_token_s for s in stats),
    )
