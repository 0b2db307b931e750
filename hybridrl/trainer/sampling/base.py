"""Sampling of a step's responses: one round, or dynamic sampling (DAPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import fmean

import torch
from torch import Tensor

from hybridrl.config.estimators import estimator_of
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import EngineStats, Generate, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import Rewarded, RewardSource

# Throughput of each engine in a call.
CallStats = tuple[EngineStats, ...]


@dataclass(frozen=True)
class Sampled:
    """Responses of a step.

    Attributes:
        batch: responses to train on, those of each prompt together.
        prompts: [B] the prompt of each response.
        rewarded: their rewards, if sampling needed them.
        greedy: one greedy response to each prompt, if the advantage estimator needs them.
    """

    batch: RolloutBatch
    prompts: list[Prompt]
    rewarded: Rewarded | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: RolloutBatch | None = None


class Sampling:
    """Sampling of responses as the algorithm section says.

    It sets the loss mask, which whitening, selected tokens and the loss share. `take` returns the
    next n training prompts.
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
        sampled = self._sample_step(step)
        if not algorithm.overlong.train_on_truncated:
            # Overlong filtering: Yu et al. 2025 (DAPO), section 3.4.
            sampled = counting(sampled, ~sampled.batch.truncated)
        if estimator_of(algorithm.advantage).needs_greedy_responses:
            asked = sampled.prompts[:: self._each]
            greedy = self._generate(request_of(asked, step, temperature=0.0, top_p=1.0))
            sampled = replace(sampled, greedy=greedy)
        return sampled

    def _sample_step(self, step: int) -> Sampled:
        """Sample the responses to train on."""
        if self._config.algorithm.max_sampling_rounds > 1:
            return self._sample_mixed(step)
        return self._round(self._config.data.prompts_per_step, step)

    def _sample_mixed(self, step: int) -> Sampled:
        """Dynamic sampling: replace prompts whose responses have equal rewards by the next.

        Each round samples exactly the missing prompts, so that no mixed prompt is thrown away.
        Unmixed prompts of the last round fill the batch; they do not count in the policy loss.

        Source: Yu et al. 2025 (DAPO), section 3.2, https://arxiv.org/abs/2503.14476
        """
        wanted = missing = self._config.data.prompts_per_step
        max_rounds = self._config.algorithm.max_sampling_rounds
        kept: list[Sampled] = []
        rewards: list[tuple[Rewarded, list[int]]] = []
        while missing and len(kept) < max_rounds:
            done = self._round(missing, step, first_sample=len(kept) * self._each)
            rewarded = self._rewards.score(done.prompts, done.batch)
            of_prompts = torch.tensor(rewarded.scores).view(missing, self._each)
            is_mixed = (of_prompts != of_prompts[:, :1]).any(1)
            missing -= int(is_mixed.sum())
            is_last = not missing or len(kept) + 1 == max_rounds
            order = (~is_mixed).long().argsort(stable=True)
            order = order if is_last else order[: int(is_mixed.sum())]
            rows = (order[:, None] * self._each + torch.arange(self._each)).flatten().tolist()
            rewards.append((rewarded, rows))
            kept.append(Sampled(done.batch.select(rows), [done.prompts[row] for row in rows]))
        scores = [score for rewarded, _ in rewards for score in rewarded.scores]
        num_prompts = len(scores) // self._each
        metrics = {
            "sampling/rounds": float(len(kept)),
            "sampling/prompts": float(num_prompts),
            "sampling/mixed_fraction": (wanted - missing) / num_prompts,
            "sampling/unmixed_prompts": float(missing),
            "sampling/reward_mean": fmean(scores),
        }
        sampled = replace(_joined(kept), rewarded=Rewarded.joined(rewards), metrics=metrics)
        if not missing:
            return sampled
        return counting(
            sampled, torch.arange(len(sampled.prompts)) < (wanted - missing) * self._each
        )

    def _round(self, missing: int, step: int, first_sample: int = 0) -> Sampled:
        """Sample responses to `missing` prompts.

        A prompt may return within a step: first_sample makes its samples differ.
        """
        prompts = self._take(missing)
        request = request_of(
            prompts,
            step,
            temperature=self._config.rollout.temperature,
            top_p=self._config.rollout.top_p,
            samples=self._each,
            first_sample=first_sample,
        )
        batch = self._generate(replace(request, returns_experts=True))
        episodes = range(len(batch)) if batch.episode is None else batch.episode.tolist()
        return Sampled(batch, [prompts[episode // self._each] for episode in episodes])


def request_of(
    prompts: Sequence[Prompt],
    step: int,
    *,
    temperature: float,
    top_p: float,
    top_k: int | None = None,
    samples: int = 1,
    first_sample: int = 0,
) -> PromptBatch:
    """Build a request for `samples` responses to each prompt.

    Seeds derive from `first_sample`, the number of samples of each prompt that exist already.
    """
    return PromptBatch(
        prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts], torch.int32),
        prompt_id=torch.tensor([prompt.prompt_id for prompt in prompts]),
        step=step,
        responses_per_prompt=samples,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        first_sample=torch.full((len(prompts),), first_sample),
    )


def counting(sampled: Sampled, counts: Tensor) -> Sampled:
    """Exclude responses that do not count ([B] bool) from the policy loss, too."""
    batch = sampled.batch
    mask = batch.counted.values & batch.responses.spread(counts)
    return replace(sampled, batch=replace(batch, loss_mask=batch.responses.like(mask)))


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """Join the rounds; groups of one prompt in two rounds stay separate."""
    batches = [part.batch for part in parts]
    batch = RolloutBatch.concat(batches)
    sizes = torch.tensor([len(part.prompts) for part in parts])
    rounds = torch.arange(len(parts)).repeat_interleave(sizes)
    group_id = batch.group_id + rounds * (int(batch.group_id.max()) + 1)
    batch = replace(
        batch,
        group_id=group_id,
        engines=total_stats([part.engines for part in batches if part.engines], first_token=max),
        environment_s=sum(part.environment_s for part in batches),
    )
    return Sampled(batch, [prompt for part in parts for prompt in part.prompts])


def total_stats(
    calls: Sequence[CallStats], first_token: Callable[[Sequence[float]], float] = itemgetter(0)
) -> CallStats:
    """Sum each engine over calls; `first_token` picks among the times of its first tokens."""
    return tuple(
        EngineStats(
            tokens=sum(stats.tokens for stats in of_engine),
            seconds=sum(stats.seconds for stats in of_engine),
            first_token_s=first_token([stats.first_token_s for stats in of_engine]),
            old_kv_tokens=sum(stats.old_kv_tokens for stats in of_engine),
        )
        for of_engine in zip(*calls, strict=True)
    )
