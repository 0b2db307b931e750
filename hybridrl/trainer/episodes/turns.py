"""Episodes of turns that calls of the engines sample: one turn, or several with an environment.

A call continues responses until their turns end, or until its budget of tokens is spent. Where a
turn has ended, `Turns` finishes the response or appends an environment's answer. So a response that
was cut and a conversation that goes on are the same thing: a response that is not finished.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import CallStats, ConversationOutcome, RolloutBatch
from hybridrl.data.images import PromptImages, image_rows
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Generate, Request, Requests, SamplingParams
from hybridrl.data.seeds import sample_seed
from hybridrl.data.sources.image_tokens import processed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.base import Grown, Until, response_name
from hybridrl.trainer.episodes.responses import Group, Place, Response, unfinished, with_responses


class Turns:
    """Rules of what follows a turn of the policy; without an environment a turn is a response.

    Attributes:
        stop_token_ids: tokens that end a turn, besides the model's end tokens.
        enough: share of a call's turns after whose end the others are cut, so that answers do not
            wait for the longest turn; None: only the budget cuts.
    """

    stop_token_ids: tuple[int, ...] = ()
    enough: float | None = None

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return the beginning of a response to each prompt."""
        return [Response.empty() for _ in prompts]

    def next(self, responses: Sequence[Response], cut: Sequence[bool]) -> list[Response]:
        """Return responses whose turns have ended, by the length limit if `cut`, as they go on."""
        return [one.finished(truncated=is_cut) for one, is_cut in zip(responses, cut, strict=True)]

    def outcome(self, responses: Sequence[Response]) -> ConversationOutcome | None:
        """Return the outcome of finished conversations; None without an environment."""
        return None

    def images(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[PromptImages | None]:
        """Return the images of prompts and answers, where responses have answers with some."""
        return [None] * len(responses)

    def take_seconds(self) -> float:
        """Return the seconds that answers have taken since the last call."""
        return 0.0


@dataclass(frozen=True)
class TurnEpisodes:
    """`Episodes` whose turns `generate` samples on given engines, with a budget of tokens."""

    config: RolloutConfig
    turns: Turns
    generate: Generate
    counts_tokens: ClassVar[bool] = True

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return the beginning of a response to each prompt."""
        return self.turns.open(prompts)

    def grow(self, groups: Sequence[Group], until: Until, params: SamplingParams) -> Grown:
        """Continue all unfinished responses until they have `until.tokens` more tokens.

        Without an environment that is one call of the engines. With one it is several, between
        which turns are answered.
        """
        groups, calls, versions = list(groups), list[CallStats](), set[int]()
        budget, images = until.tokens, processed(group.prompt.images for group in groups)
        while (places := unfinished(groups)) and (budget > 0 or places[0][0] < until.needed):
            sizes = until.needed, max(0, budget)
            requests = self._requests(groups, images, places, *sizes, params)
            part = self.generate(requests)
            calls.append(part.engines)
            versions.update(part.weight_version.tolist())
            before = [groups[g].responses[k] for g, k in places]
            after = self._continued(before, part)
            budget -= sum(map(len, after)) - sum(map(len, before))
            groups = with_responses(groups, dict(zip(places, after, strict=True)))
        return Grown(groups, calls, frozenset(versions), self.turns.take_seconds())

    def batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the responses of finished groups as a batch."""
        rows = [(index, group) for index, group in enumerate(groups) for _ in group.responses]
        responses = [response for group in groups for response in group.responses]
        own = self.turns.images([group.prompt for _, group in rows], responses)
        given = processed(group.prompt.images for _, group in rows)

        def ragged(name: str, dtype: torch.dtype) -> Ragged:
            return Ragged.from_rows([vars(response)[name] for response in responses], dtype)

        return RolloutBatch(
            prompts=Ragged.from_rows([group.prompt.token_ids for _, group in rows], torch.int32),
            responses=ragged("tokens", torch.int32),
            response_mask=ragged("mask", torch.bool),
            rollout_log_probs=ragged("log_probs", torch.float32),
            group_id=torch.tensor([index for index, _ in rows]),
            images=image_rows(a or b for a, b in zip(own, given, strict=True)),
            weight_version=torch.tensor([int(response.versions[-1]) for response in responses]),
            truncated=torch.tensor([response.truncated for response in responses]),
            token_versions=ragged("versions", torch.int32),
            conversation=self.turns.outcome(responses),
            added={"engine": torch.tensor([group.engine for _, group in rows])},
        )

    def _continued(self, responses: Sequence[Response], part: RolloutBatch) -> list[Response]:
        """Return responses with the tokens of a call, and with what follows ended turns."""
        is_open = part.unfinished.tolist()
        rows = zip(
            responses,
            part.responses.rows(),
            part.rollout_log_probs.rows(),
            part.weight_version.tolist(),
            is_open,
            strict=True,
        )
        new = [
            response.with_sampled(tokens, log_probs, version, turn_ends=not goes_on)
            for response, tokens, log_probs, version, goes_on in rows
        ]
        ended = [index for index, goes_on in enumerate(is_open) if not goes_on]
        cut = part.truncated[ended].tolist()
        after = self.turns.next([new[index] for index in ended], cut)
        for index, response in zip(ended, after, strict=True):
            new[index] = response
        return new

    def _requests(
        self,
        groups: Sequence[Group],
        images: Sequence[PromptImages | None],
        places: Sequence[Place],
        needed: int,
        budget: float,
        params: SamplingParams,
    ) -> Requests:
        """Return requests whose prompts are prompts with their responses so far.

        `images` are those of the groups.
        """
        is_cut, most = math.isfinite(budget), self.config.max_response_tokens
        params = replace(params, stop_token_ids=self.turns.stop_token_ids)
        requests = []
        responses = [groups[g].responses[k] for g, k in places]
        more = self.turns.images([groups[g].prompt for g, _ in places], responses)
        for (g, k), own in zip(places, more, strict=True):
            group, response = groups[g], groups[g].responses[k]
            request = Request(
                request_id=response_name(group.step, group.prompt, group.first_sample + k),
                prompt=[*group.prompt.token_ids, *response.tokens.tolist()],
                seed=self._seed(group, k, *response.seed_parts),
                max_tokens=most - len(response),
                params=params,
                engine=group.engine,
                must_finish=is_cut and g < needed,
                images=own or images[g],
            )
            requests.append(request)
        return Requests(
            requests,
            torch.tensor([groups[g].prompt.prompt_id for g, _ in places]),
            token_budget=budget / len(places) if is_cut else None,
            enough_ended=self.turns.enough if is_cut else None,
            holds=self.config.keep_kv and is_cut,
        )

    def _seed(self, group: Group, index: int, *parts: str | int) -> int:
        """Return the seed of a response, or of its `parts`."""
        seed, prompt_id = self.config.seed, group.prompt.prompt_id
        return sample_seed(seed, group.step, prompt_id, group.first_sample + index, *parts)
