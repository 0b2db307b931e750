"""The seam of episodes, and generation of whole responses by it.

    one turn        turns.py            tokens up to an end token
    conversation    conversations.py    turns of the policy, between them answers of an environment
    program         agents/training     a program that samples through an endpoint

Sources (trainer/sampling) decide which groups grow, and until when.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import CallStats, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.partition import balance
from hybridrl.data.requests import Request, Requests, SamplingParams, total_stats
from hybridrl.data.seeds import sample_seed
from hybridrl.data.sources.image_tokens import processed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.responses import Group, Response


@dataclass(frozen=True)
class Wanted:
    """Whole responses to sample, `each` to each prompt.

    Attributes:
        step: training step, or evaluation at that step.
        params: distribution of their tokens.
        first: index of the first response among all to its prompt in the step; seeds derive from
            it.
        expected_tokens: cost of each prompt on its engine, highest first; None: its length.
        returns_recorded: training needs what the engine records of the responses, if it does.
    """

    prompts: Sequence[Prompt]
    step: int
    params: SamplingParams
    each: int = 1
    first: int = 0
    expected_tokens: Sequence[float] | None = None
    returns_recorded: bool = False

    def balanced(self, lengths: ResponseLengths) -> "Wanted":
        """Return the same with the tokens that are expected by known lengths."""
        ids = [prompt.prompt_id for prompt in self.prompts]
        known = lengths.expect(ids, [len(one.token_ids) for one in self.prompts], self.each)
        return replace(self, expected_tokens=known)

    def engines(self, count: int) -> list[int]:
        """Return the engine of each prompt, by cost."""
        cost = self.expected_tokens or [len(prompt.token_ids) for prompt in self.prompts]
        parts = balance(range(len(cost)), cost, count)
        of_prompt = {prompt: engine for engine, part in enumerate(parts) for prompt in part}
        return [of_prompt[prompt] for prompt in range(len(cost))]

    def requests(self, config: RolloutConfig) -> Requests:
        """Return the requests for responses of one turn, in order."""
        samples = range(self.first, self.first + self.each)
        images = processed(prompt.images for prompt in self.prompts)
        return Requests(
            [
                Request(
                    request_id=response_name(self.step, prompt, sample),
                    prompt=prompt.token_ids,
                    seed=sample_seed(config.seed, self.step, prompt.prompt_id, sample),
                    max_tokens=config.max_response_tokens,
                    params=self.params,
                    images=own,
                )
                for prompt, own in zip(self.prompts, images, strict=True)
                for sample in samples
            ],
            torch.tensor([one.prompt_id for one in self.prompts]).repeat_interleave(self.each),
            each=self.each,
            expected_tokens=self.expected_tokens,
            returns_recorded=self.returns_recorded,
        )


def response_name(step: int, prompt: Prompt, sample: int) -> str:
    """Return the name of a response: the step that began it, its prompt, its number."""
    return f"{step}-{prompt.prompt_id}-{sample}"


@dataclass(frozen=True)
class Until:
    """Condition that ends the growth of groups for now.

    Attributes:
        needed: the oldest groups that are finished, whatever ends the others.
        finished: finished groups that are enough for programs, whose tokens are not foreseen.
        tokens: budget of turns, in tokens of all responses; infinite: all are finished.
    """

    needed: int
    finished: int
    tokens: float = math.inf


@dataclass(frozen=True)
class Grown:
    """Groups that have grown.

    Attributes:
        calls: throughput of the engines in each call.
        versions: of the weights that sampled the new tokens.
        environment_s: seconds that the engines waited for environments or programs.
    """

    groups: list[Group]
    calls: list[CallStats]
    versions: frozenset[int]
    environment_s: float = 0.0


class Episodes(Protocol):
    """How responses grow.

    Attributes:
        counts_tokens: the tokens of an unfinished response are known.
    """

    @property
    def counts_tokens(self) -> bool: ...  # noqa: D102

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return the beginning of a response to each prompt, which all its responses share."""
        ...

    def grow(self, groups: Sequence[Group], until: Until, params: SamplingParams) -> Grown:
        """Continue the unfinished responses of groups, oldest first."""
        ...

    def batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the responses of finished groups as a batch; `group_id` is the group's index."""
        ...


# Samples whole responses, those to each prompt together.
GenerateWhole = Callable[[Wanted], RolloutBatch]


@dataclass(frozen=True)
class Generator:
    """Generator of whole responses to prompts: `generate`, and how they grow."""

    episodes: Episodes
    generate: GenerateWhole

    def __call__(self, wanted: Wanted) -> RolloutBatch:
        """Generate the responses, in order."""
        return self.generate(wanted)


def whole_episodes(
    episodes: Episodes,
    engines: Callable[[Wanted, int], list[int]],
    num_engines: int,
    wanted: Wanted,
) -> RolloutBatch:
    """Return the responses to each prompt, which have grown to their end.

    `engines` chooses the engine of each prompt.
    """
    prompts = wanted.prompts
    rows = zip(prompts, engines(wanted, num_engines), episodes.open(prompts), strict=True)
    groups = [
        Group(prompt, wanted.step, 0, engine, (response,) * wanted.each, wanted.first)
        for prompt, engine, response in rows
    ]
    grown = episodes.grow(groups, Until(len(prompts), len(prompts)), wanted.params)
    assert len(grown.versions) <= 1, "the weights changed within an episode"
    batch = episodes.batch(grown.groups)
    return replace(
        batch,
        group_id=torch.tensor([prompt.prompt_id for prompt in prompts])[batch.group_id],
        # Of conversations, weight_version says the same.
        token_versions=None if batch.episode is None else batch.token_versions,
        engines=total_stats(grown.calls),
        environment_s=grown.environment_s,
    )
