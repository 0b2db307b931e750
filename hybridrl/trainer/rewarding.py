"""Rewards of finished responses: decoded texts, scored by the reward processes."""

from collections.abc import Callable, Sequence
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
from hybridrl.rewards.messages import Failure
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.trainer.errors import RunStopped


@dataclass(frozen=True)
class Rewarded:
    """Texts and scores of responses.

    Attributes:
        texts: [B] decoded responses, special tokens left out.
        scores: [B] reward before the KL penalty.
        failures: rewards that raised, hung or were no number.
        parts: name -> that part of the score, of the responses that have it.
    """

    texts: list[str]
    scores: list[float]
    failures: list[Failure]
    parts: dict[str, list[float]] = field(default_factory=dict)

    def select(self, rows: Sequence[int]) -> "Rewarded":
        """Select responses; `parts` stays that of all."""
        place = {row: index for index, row in enumerate(rows)}
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            scores=[self.scores[row] for row in rows],
            failures=[
                replace(failure, index=place[failure.index])
                for failure in self.failures
                if failure.index in place
            ],
        )

    @classmethod
    def concat(cls, several: Sequence["Rewarded"]) -> "Rewarded":
        """Concatenate responses."""
        failures, start = [], 0
        for one in several:
            failures += [replace(fail, index=start + fail.index) for fail in one.failures]
            start += len(one.scores)
        names = {name for one in several for name in one.parts}
        return cls(
            [text for one in several for text in one.texts],
            [score for one in several for score in one.scores],
            failures,
            {name: [v for one in several for v in one.parts.get(name, [])] for name in names},
        )

    def stop_if_all_failed(self, step: int) -> None:
        """Raise RunStopped if all rewards of a step failed."""
        if len(self.failures) < len(self.scores):
            return
        first = self.failures[0]
        raise RunStopped(
            f"step {step}: all {len(self.scores)} rewards failed, so there is nothing to learn "
            f"from. The first: {first.kind}: {first.reason}\n{first.traceback}"
        )

    def part_metrics(self) -> dict[str, float]:
        """Compute reward/part_<name>: unweighted means over the responses with that part."""
        return {f"reward/part_{name}": fmean(values) for name, values in self.parts.items()}


class RewardSource(Protocol):
    """Source of rewards: a function of finished responses, or their environments."""

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Return the responses' texts and scores; prompts[b] belongs to response b."""
        ...


def overlong_shaping(config: RunConfig) -> Callable[[Tensor], Tensor]:
    """Build the penalty for overlong responses: lengths [B] -> [B] <= 0.

    Source: Yu et al. 2025 (DAPO), equation 13, https://arxiv.org/abs/2503.14476
    """
    overlong, max_tokens = config.algorithm.overlong, config.rollout.max_response_tokens
    if overlong.buffer_tokens == 0:
        return lambda lengths: torch.zeros(len(lengths))
    return lambda lengths: (
        overlong.penalty
        * overlong_penalty(lengths, max_tokens=max_tokens, buffer=overlong.buffer_tokens)
    )


def data_set_means(prompts: Sequence[Prompt], outcome: Tensor) -> dict[str, float]:
    """Compute reward/mean_<data set> for each data set of a mixture in this step.

    Args:
        prompts: [B] the prompt of each response.
        outcome: [B] the responses' rewards.
    """
    rows: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt.dataset:
            rows.setdefault(prompt.dataset, []).append(row)
    return {f"reward/mean_{name}": float(outcome[of_set].mean()) for name, of_set in rows.items()}


def outcome_metrics(
    prompts: Sequence[Prompt], outcome: Tensor, penalty: Tensor
) -> dict[str, float]:
    """Compute reward/mean, reward/mean_<data set>, reward/std and reward/overlong_penalty.

    Args:
        prompts: [B] the prompt of each response.
        outcome: [B] the responses' rewards.
        penalty: [B] <= 0, part of the outcome, for the length.
    """
    return data_set_means(prompts, outcome) | {
        "reward/mean": float(outcome.mean()),
        "reward/std": float(outcome.std(correction=0)),
        "reward/overlong_penalty": -float(penalty.mean()),
    }


def outcome_on_last_token(outcomes: Tensor, responses: Ragged) -> Ragged:
    """Place each outcome on the last token of its response; other tokens score 0."""
    assert (responses.lengths > 0).all(), "a response has at least its end token"
    scores = torch.zeros(len(responses.values), dtype=torch.float32)
    scores[responses.lengths.cumsum(0) - 1] = outcomes.float()
    return responses.like(scores)


class FunctionRewards:
    """Rewards by the run's reward function.

    Args:
        decode: token ids of many responses -> their texts.
        scorer: runs the reward function in other processes.
    """

    def __init__(self, decode: Decode, scorer: RewardScorer) -> None:
        self._decode = decode
        self._scorer = scorer

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Return the responses' texts and scores; prompts[b] belongs to response b."""
        texts = self._decode(row.tolist() for row in batch.responses.rows())
        items = [
            (prompt.text, text, prompt.example) for prompt, text in zip(prompts, texts, strict=True)
        ]
        result = self._scorer.score(items)
        return Rewarded(texts, list(result.scores), list(result.failures), result.parts)
