"""From sampled tokens to scores: decode, then ask the reward processes."""

import math
from dataclasses import dataclass, field

from hybridrl.data.prompts import Prompt
from hybridrl.data.ragged import Ragged
from hybridrl.data.tokenizer import Decode
from hybridrl.rewards.scorer import Failure, RewardScorer


@dataclass(frozen=True)
class Rewarded:
    """Responses as text and what they were worth.

    Attributes:
        texts: [B] decoded responses, special tokens left out.
        scores: [B] reward before the KL penalty.
        failures: the rewards that raised, hung or were no number.
        parts: by name, what the scores of the responses that have such a part were made of.
    """

    texts: list[str]
    scores: list[float]
    failures: list[Failure]
    parts: dict[str, list[float]] = field(default_factory=dict)

    def part_metrics(self) -> dict[str, float]:
        """reward/part_<name>: each part's mean over the responses that have it, unweighted."""
        return {
            f"reward/part_{name}": math.fsum(values) / len(values)
            for name, values in self.parts.items()
        }


class Rewarder:
    """Scores responses by the run's reward function.

    Args:
        decode: token ids of many responses -> their texts.
        scorer: runs the reward function outside this process.
    """

    def __init__(self, decode: Decode, scorer: RewardScorer) -> None:
        self._decode = decode
        self._scorer = scorer

    def score(self, prompts: list[Prompt], responses: Ragged) -> Rewarded:
        """The responses' texts and scores; prompts[b] belongs to response b."""
        texts = self._decode([row.tolist() for row in responses.rows()])
        items = [
            (prompt.text, text, prompt.example) for prompt, text in zip(prompts, texts, strict=True)
        ]
        result = self._scorer.score(items)
        return Rewarded(texts, list(result.scores), list(result.failures), result.parts)
