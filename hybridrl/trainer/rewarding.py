"""Rewards of finished responses: by the reward function, a reward model and their length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from hybridrl.algorithms.advantages import overlong_penalty
from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.processes.messages import Failure
from hybridrl.rewards.base import RewardItem
from hybridrl.rewards.scorer import RewardScorer, ScoreResult
from hybridrl.trainer.errors import RunStopped


@dataclass(frozen=True)
class Rewarded:
    """Texts and scores of responses.

    Attributes:
        texts: [B] decoded responses, special tokens left out.
        scores: [B] reward before the KL penalty.
        failures: rewards that raised, hung or were no number.
        parts: name -> that part of the score, of the responses that have it.
        row_parts: [B] the parts of each response's score; empty if no response has any.
    """

    texts: list[str]
    scores: list[float]
    failures: list[Failure]
    parts: dict[str, list[float]] = field(default_factory=dict)
    row_parts: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Iterable[tuple["Rewarded", Sequence[int]]]) -> "Rewarded":
        """Join the given rows of each; the parts of scores stay those of all rows."""
        joined = cls([], [], [])
        for one, rows in parts:
            failed = {failure.index: failure for failure in one.failures}
            for row in rows:
                if row in failed:
                    joined.failures.append(replace(failed[row], index=len(joined.scores)))
                joined.texts.append(one.texts[row])
                joined.scores.append(one.scores[row])
                joined.row_parts.append(one.row_parts[row] if one.row_parts else {})
            for name, values in one.parts.items():
                joined.parts.setdefault(name, []).extend(values)
        return joined

    def stop_if_all_failed(self, step: int, num_episodes: int) -> None:
        """Raise RunStopped if all rewards of a step, one for each episode, failed."""
        if len(self.failures) < num_episodes:
            return
        first = self.failures[0]
        raise RunStopped(
            f"step {step}: all {num_episodes} rewards failed, so there is nothing to learn "
            f"from. The first: {first.kind}: {first.reason}\n{first.traceback}"
        )

    def part_metrics(self) -> dict[str, float]:
        """Compute reward/part_<name>: unweighted means over the responses with that part."""
        return {f"reward/part_{name}": fmean(values) for name, values in self.parts.items()}


def reward_items(
    prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]
) -> list[RewardItem]:
    """Return what a reward function is asked, from texts and token ids of responses."""
    rows = zip(prompts, texts, ids, strict=True)
    return [(prompt.text, text, prompt.example, row) for prompt, text, row in rows]


class RewardSource(Protocol):
    """Source of rewards: a function of finished responses, or their environments."""

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Return the responses' texts and scores; prompts[b] belongs to response b."""
        ...


def baseline_rewards(
    config: RunConfig, rewards: RewardSource, prompts: list[Prompt], greedy: RolloutBatch
) -> Tensor:
    """Compute the greedy response's score for each response to its prompt, [B].

    The score includes the penalty for length. `prompts` has the prompt of each sampled response,
    `greedy` one response to each prompt.

    Source: Li et al. 2024 (ReMax), https://arxiv.org/abs/2310.10505
    """
    each = len(prompts) // len(greedy)
    scores = torch.tensor(rewards.score(prompts[::each], greedy).scores)
    return (scores + overlong_shaping(config, greedy.responses.lengths)).repeat_interleave(each)


def add_model_scores(
    rewarded: Rewarded, batch: RolloutBatch, per_token: Ragged, weight: float
) -> tuple[Rewarded, dict[str, float]]:
    """Compute score + weight * reward model's score; reward/model_mean is unweighted.

    The reward model's score of a response is on its last token. That of an agent's episode is the
    mean over its token sequences, each with the weight of its sampled tokens.

    Raises:
        RunStopped: a score of the model is NaN or infinite.
    """
    scores = per_token.values[per_token.lengths.cumsum(0) - 1].double()
    if wrong := int((~scores.isfinite()).sum()):
        raise RunStopped(
            f"the reward model scored {wrong} of {len(scores)} responses NaN or infinite; "
            f"try fsdp.param_dtype=float32, or another checkpoint"
        )
    scores = _of_episodes(scores, batch)
    pairs = zip(rewarded.scores, scores.tolist(), strict=True)
    total = [score + weight * more for score, more in pairs]
    mean = float(scores[batch.last_of_episodes].mean())
    return replace(rewarded, scores=total), {"reward/model_mean": mean}


def _of_episodes(scores: Tensor, batch: RolloutBatch) -> Tensor:
    """Return [B], for each response the mean of `scores` [B] over its episode."""
    if batch.episode is None:
        return scores
    tokens = batch.response_mask.counts().double()
    # Of an episode that sampled nothing, sequences weigh the same.
    weights = tokens.where(batch.summed_over_episodes(tokens) > 0, 1.0)
    sums, totals = map(batch.summed_over_episodes, (weights * scores, weights))
    return sums / totals


def overlong_shaping(config: RunConfig, lengths: Tensor) -> Tensor:
    """Compute the penalty for overlong responses: lengths [B] -> [B] <= 0.

    Source: Yu et al. 2025 (DAPO), equation 13, https://arxiv.org/abs/2503.14476
    """
    overlong, max_tokens = config.algorithm.overlong, config.rollout.max_response_tokens
    buffer = overlong.buffer_tokens
    if buffer == 0:
        return torch.zeros(len(lengths))
    return overlong.penalty * overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer)


def mixed_fraction(outcome: Tensor, each: int) -> dict[str, float]:
    """Compute reward/mixed_fraction, the share of prompts whose responses differ in reward.

    `outcome` [B] has `each` responses to a prompt in a row; a single one makes no group.
    """
    groups = outcome.view(-1, each)
    mixed = (groups != groups[:, :1]).any(1).float().mean()
    return {"reward/mixed_fraction": float(mixed)} if each > 1 else {}


def outcome_metrics(
    prompts: Sequence[Prompt], outcome: Tensor, penalty: Tensor
) -> dict[str, float]:
    """Compute reward/mean, reward/mean_<data set>, reward/std and reward/overlong_penalty.

    `outcome` [B] has the responses' rewards, of which `penalty` [B] <= 0 is that for the length.
    """
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt.dataset:
            rows.setdefault(prompt.dataset, []).append(row)
    means = {f"reward/mean_{name}": float(outcome[own].mean()) for name, own in rows.items()}
    return means | {
        "reward/mean": float(outcome.mean()),
        "reward/std": float(outcome.std(correction=0)),
        "reward/overlong_penalty": -float(penalty.mean()),
    }


def outcome_on_last_token(outcomes: Tensor, batch: RolloutBatch) -> Ragged:
    """Place each outcome on the last sampled token of its response; other tokens score 0."""
    responses = batch.responses
    assert (responses.lengths > 0).all(), "a response has at least its end token"
    scores = torch.zeros(len(responses.values), dtype=torch.float32)
    scores[batch.last_sampled] = outcomes.float()
    return responses.like(scores)


class FunctionRewards:
    """Rewards by the run's reward function, which runs in other processes."""

    def __init__(self, decode: Decode, scorer: RewardScorer) -> None:
        self._decode = decode
        self._scorer = scorer

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Decode the responses and score their texts."""
        ids = [row.tolist() for row in batch.responses.rows()]
        texts = self._decode(ids)
        result = self._scorer.score(reward_items(prompts, texts, ids))
        return Rewarded(texts, result.scores, result.failures, result.parts, result.item_parts)

    def score_texts(self, prompt: Prompt, texts: Sequence[str]) -> ScoreResult:
        """Score texts as responses to one prompt; they have no token ids."""
        return self._scorer.score(reward_items([prompt] * len(texts), texts, [[]] * len(texts)))
