"""Prediction of the tokens that a prompt costs, from the lengths of its earlier responses."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Weight in a recent mean of what is a step older.
DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Mean:
    """Running mean; of integers exact in any order, unless older ones count less."""

    count: float = 0
    total: float = 0

    def plus(self, value: int) -> "Mean":
        """Return the mean after one more number."""
        return Mean(self.count + 1, self.total + value)

    def faded(self) -> "Mean":
        """Return the same mean, which later numbers change more."""
        return Mean(DECAY * self.count, DECAY * self.total)

    @property
    def value(self) -> float:
        """Mean; 0 without numbers."""
        return self.total / self.count if self.count else 0.0


NONE = Mean()


@dataclass
class ResponseLengths:
    """Mean response lengths by prompt, kept by the controller over the steps of a run.

    Predictions are deterministic, so a resumed run partitions prompts alike. `expect` uses new
    lengths at once; `state` contains them after `commit`. Only changes are kept apart, since a run
    may have hundreds of thousands of prompts.

    Attributes:
        seen: prompt id -> lengths of its responses, up to the last commit.
        overall: lengths of all responses, up to the last commit.
        in_parts: of responses for training that are sampled in parts (partial, split), recent ones
            above all: lengths change during training.
    """

    seen: dict[int, Mean] = field(default_factory=dict)
    overall: Mean = NONE
    in_parts: Mean = NONE

    def __post_init__(self) -> None:
        self._overall, self._in_parts = self.overall, self.in_parts
        # Lengths since the last commit, then the others.
        self._known = ChainMap[int, Mean]({}, self.seen)

    def commit(self) -> None:
        """Merge the lengths of a finished step into the attributes."""
        self.seen.update(self._known.maps[0])
        self._known.maps[0].clear()
        if self._in_parts != self.in_parts:
            self._in_parts = self._in_parts.faded()
        self.overall, self.in_parts = self._overall, self._in_parts

    def state(self) -> dict[str, Any]:
        """Return plain JSON: each mean as [count, total], those of `seen` by prompt id."""
        seen = {str(prompt_id): [m.count, m.total] for prompt_id, m in self.seen.items()}
        means = {"overall": self.overall, "in_parts": self.in_parts}
        return {name: [mean.count, mean.total] for name, mean in means.items()} | {"seen": seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the value of `state`."""
        self.seen = {int(prompt_id): Mean(*mean) for prompt_id, mean in state["seen"].items()}
        self.overall = Mean(*state["overall"])
        self.in_parts = Mean(*state.get("in_parts", ()))
        self.__post_init__()

    def expect(
        self, prompt_ids: Sequence[int], prompt_lengths: Sequence[int], each: int
    ) -> list[float]:
        """Predict the tokens that each prompt with `each` responses costs its engine.

        The prompt counts once (prefix caching). A response is expected to have the mean length of
        the prompt's earlier responses, or of all responses if the prompt is new.
        """
        means = [self._known.get(prompt_id, self._overall).value for prompt_id in prompt_ids]
        return [n + each * mean for n, mean in zip(prompt_lengths, means, strict=True)]

    @property
    def mean(self) -> float:
        """Recent mean length in parts, before there is one that of all; 0 if there are none."""
        return (self._in_parts if self._in_parts.count else self._overall).value

    def learn(
        self, prompt_ids: Sequence[int], lengths: Sequence[int], *, in_parts: bool = False
    ) -> None:
        """Add the lengths of responses to these prompts."""
        for prompt_id, length in zip(prompt_ids, lengths, strict=True):
            self._known[prompt_id] = self._known.get(prompt_id, NONE).plus(length)
            self._overall = self._overall.plus(length)
            if in_parts:
                self._in_parts = self._in_parts.plus(length)
