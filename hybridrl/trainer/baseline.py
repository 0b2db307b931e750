"""Baseline of ReMax: rewards of greedy responses; a null object for other estimators."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.config.schema import RunConfig
from hybridrl.data.batch import Generate, Rollout
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.rewarding import RewardSource
from hybridrl.trainer.sampling import request_for


class NoBaseline:
    """Null object for estimators without a baseline."""

    def generate(self, prompts: Sequence[Prompt], step: int) -> None:
        """Generate nothing."""

    def rewards(self) -> None:
        """Return None."""


class GreedyBaseline:
    """Reward of the greedy response to each prompt.

    Args:
        config: the run.
        generate: samples responses.
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
        """Decode one response greedily to each prompt, while vLLM is awake."""
        each = self._config.rollout.responses_per_prompt
        self._prompts = list(prompts[::each])
        request = request_for(self._config, self._prompts, step)
        greedy = replace(request, responses_per_prompt=1, temperature=0.0, top_p=1.0)
        self._rollout = self._generate(greedy)

    def rewards(self) -> Tensor:
        """Return the greedy response's score for each response to its prompt, [B]."""
        assert self._rollout is not None, "nothing was generated"
        rewarded = self._rewards.score(self._prompts, self._rollout.batch)
        each = self._config.rollout.responses_per_prompt
        return torch.tensor(rewarded.scores).repeat_interleave(each)


Baseline = NoBaseline | GreedyBaseline
