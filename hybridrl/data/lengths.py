"""How many tokens a prompt will cost, from what its responses took before."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.data.batch import PromptBatch, RolloutBatch


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean of whole numbers, exact in any order.

    Attributes:
        count: numbers so far.
        total: their sum.
    """

    count: int = 0
    total: int = 0

    def plus(self, value: int) -> "Mean":
        """This mean after one more number."""
        return Mean(self.count + 1, self.total + value)

    @property
    def value(self) -> float:
        """The mean; 0 of no numbers."""
        return self.total / self.count if self.count else 0.0


def expected_tokens(
    prompt_lengths: Sequence[int],
    prompt_ids: Sequence[int],
    seen: Mapping[int, Mean],
    overall: Mean,
    responses_per_prompt: int,
) -> Tensor:
    """Tokens each prompt will cost its engine: [P] float64.

    The prompt is computed once, however many responses it gets (prefix caching); each response
    is expected to be as long as the prompt's earlier ones, or as all were if it is new.

    Args:
        prompt_lengths: tokens of each prompt.
        prompt_ids: their ids.
        seen: prompt id -> lengths of its responses so far.
        overall: lengths of all responses so far.
        responses_per_prompt: samples of each prompt.
    """
    responses = [seen.get(prompt_id, overall).value for prompt_id in prompt_ids]
    return torch.tensor(
        [
            prompt + responses_per_prompt * response
            for prompt, response in zip(prompt_lengths, responses, strict=True)
        ],
        dtype=torch.float64,
    )


@dataclass
class ResponseLengths:
    """Lengths of the responses so far, kept by the controller from step to step.

    The same history gives the same estimates, so prompts are dealt alike in every run of it. What
    a step learns counts at once in what is expected, and in `state` once it is committed: a run
    may have hundreds of thousands of prompts, of which a step changes a few.

    Attributes:
        seen: prompt id -> its responses, up to the last commit.
        overall: all responses up to the last commit.
    """

    seen: dict[int, Mean] = field(default_factory=dict)
    overall: Mean = field(default_factory=Mean)

    def __post_init__(self) -> None:
        self._learned: dict[int, Mean] = {}
        self._known = ChainMap(self._learned, self.seen)
        self._overall = self.overall

    def commit(self) -> None:
        """Count what was learned since the last commit as of a finished step."""
        self.seen.update(self._learned)
        self._learned.clear()
        self.overall = self._overall

    def state(self) -> dict[str, Any]:
        """As plain JSON: `overall` and, by prompt id, `seen` as [count, total]."""
        seen = {str(prompt_id): [m.count, m.total] for prompt_id, m in self.seen.items()}
        return {"overall": [self.overall.count, self.overall.total], "seen": seen}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "ResponseLengths":
        """The lengths of which `state` was told."""
        seen = {int(prompt_id): Mean(*mean) for prompt_id, mean in state["seen"].items()}
        return cls(seen, Mean(*state["overall"]))

    def expect(self, prompts: PromptBatch) -> PromptBatch:
        """The prompts with the tokens that each is expected to cost."""
        expected = expected_tokens(
            prompts.prompts.lengths.tolist(),
            prompts.prompt_id.tolist(),
            self._known,
            self._overall,
            prompts.responses_per_prompt,
        )
        return replace(prompts, expected_tokens=expected)

    def learn(self, batch: RolloutBatch) -> None:
        """Take in how long responses have become."""
        for prompt_id, length in zip(
            batch.group_id.tolist(), batch.responses.lengths.tolist(), strict=True
        ):
            self._learned[prompt_id] = self._known.get(prompt_id, Mean()).plus(length)
            self._overall = self._overall.plus(length)
