"""The seam of episodes, and generation of whole responses by it.

    one turn        turns.py            tokens up to an end token
    conversation    conversations.py    turns of the policy, between them answers of an environment
    program         agents/training     a program that samples through an endpoint

Sources (trainer/sampling) decide which groups grow, and until when.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hybridrl.data.batch import CallStats, Generate, PromptBatch, RolloutBatch, total_stats
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.responses import Group, Response


@dataclass(frozen=True)
class Sampling:
    """Distribution from which tokens are sampled: as in `PromptBatch`."""

    temperature: float
    top_p: float
    top_k: int | None = None


@dataclass(frozen=True)
class Until:
    """What ends the growth of groups for now.

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

    def grow(self, groups: Sequence[Group], until: Until, sampling: Sampling) -> Grown:
        """Continue the unfinished responses of groups, oldest first."""
        ...

    def batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the responses of finished groups as a batch; `group_id` is the group's index."""
        ...


@dataclass(frozen=True)
class Generator:
    """Generator of whole responses to prompts: `generate`, and how they grow."""

    episodes: Episodes
    generate: Generate

    def __call__(self, request: PromptBatch) -> RolloutBatch:
        """Generate `responses_per_prompt` responses to each prompt, in order."""
        return self.generate(request)


def whole_episodes(
    episodes: Episodes,
    prompts: Mapping[int, Prompt],
    engines: Callable[[PromptBatch, int], list[int]],
    num_engines: int,
    request: PromptBatch,
) -> RolloutBatch:
    """Return `responses_per_prompt` responses to each prompt, which have grown to their end.

    `prompts` are those of training and evaluation by id; `engines` chooses the engine of each.
    """
    each, count = request.responses_per_prompt, len(request)
    asked = [prompts[number] for number in request.prompt_id.tolist()]
    firsts = [0] * count if request.first_sample is None else request.first_sample.tolist()
    rows = zip(asked, engines(request, num_engines), episodes.open(asked), firsts, strict=True)
    groups = [
        Group(prompt, request.step, 0, engine, (response,) * each, first)
        for prompt, engine, response, first in rows
    ]
    sampling = Sampling(request.temperature, request.top_p, request.top_k)
    grown = episodes.grow(groups, Until(count, count), sampling)
    assert len(grown.versions) <= 1, "the weights changed within an episode"
    batch = episodes.batch(grown.groups)
    return replace(
        batch,
        group_id=request.prompt_id[batch.group_id],
        # Of conversations, weight_version says the same.
        token_versions=None if batch.episode is None else batch.token_versions,
        engines=total_stats(grown.calls),
        environment_s=grown.environment_s,
    )


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
