"""Rewards of greedy responses, with which ReMax compares sampled ones; or nothing.

Chosen once from config; the loop calls the same methods whichever it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import Generate, Rollout
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import RewardSource
from hybridrl.trainer.sampling import request_for


class Baseline(Protocol):
    """What an outcome is compared with, beside other outcomes."""

    def generate(self, prompts: Sequence[Prompt], step: int) -> None:
        """Called while vLLM is awake, with the prompt of each response."""
        ...

    def rewards(self) -> Tensor | None:
        """[B] float32: of each response's prompt; called after `generate`."""
        ...


class NoBaseline:
    """The advantage estimator takes none."""

    def generate(self, prompts: Sequence[Prompt], step: int) -> None:
        """Nothing is generated."""

    def rewards(self) -> None:
        """None."""


class GreedyBaseline:
    """The outcome of the greedy response to each prompt.

    Args:
        config: the run.
        generate: decodes responses.
        rewards: scores them.

    Source: Li et al. 2024 (ReMax), https://arxiv.org/abs/2310.10505
    """

    def __init__(self, config: RunConfig, generate: Generate, rewards: RewardSource) -> None:
        self._config = config
        self._generate = generate
        self._rewards = rewards
        self._rollout: Rollout | None = None
        self._prompts: list[Prompt] = []

    def generate(self, prompts: Sequence[Prompt], step: int) -> None:
        """Decode one response greedily to each prompt."""
        each = self._config.rollout.responses_per_prompt
        self._prompts = list(prompts[::each])
        request = request_for(self._config, self._prompts, step)
        greedy = replace(request, responses_per_prompt=1, temperature=0.0, top_p=1.0)
        self._rollout = self._generate(greedy)

    def rewards(self) -> Tensor:
        """[B] the greedy responses' scores, each for all responses to its prompt."""
        assert self._rollout is not None, "nothing was generated"
        rewarded = self._rewards.score(self._prompts, self._rollout.batch)
        each = self._config.rollout.responses_per_prompt
        return torch.tensor(rewarded.scores).repeat_interleave(each)
