"""Responses so far, in groups: the state of sampling between two steps, and in checkpoints."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import NO_VERSION
from hybridrl.data.sources.images import ImageFile, read_image
from hybridrl.data.sources.prompts import Prompt
from hybridrl.processes.messages import FailureKind

# Classes of `EpisodeState` by their `kind` in checkpoints; imported when they are read.
STATES = {
    "conversation": "hybridrl.trainer.episodes.conversations.Conversation",
    "program": "hybridrl.agents.training.episodes.EndedProgram",
}
_DTYPES = {"tokens": np.int32, "log_probs": np.float32, "versions": np.int32, "mask": np.bool_}


@dataclass(frozen=True, kw_only=True)
class EpisodeState:
    """State of an episode beside the tokens of its response.

    Attributes:
        kind: name in checkpoints; "" if it ends with the driver, so that the episode begins anew.
        reward: earned so far.
        failure, reason: failure of the environment or program, if any.
    """

    kind: ClassVar[str] = ""

    reward: float = 0.0
    failure: FailureKind | None = None
    reason: str = ""

    def encode(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**vars(self)}

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> Self:
        """Return the state of a value of `encode`."""
        failure = fields["failure"] and FailureKind(fields["failure"])
        return cls(**fields | {"failure": failure})


@dataclass(frozen=True)
class Response:
    """A response so far: not begun, cut within a turn, between two turns, or finished.

    Attributes:
        tokens: [n] int32, those of the environment between those of the policy.
        log_probs: [n] float32, nats, of each token when it was sampled; 0 for the environment's.
        versions: [n] int32, number of the weights that sampled each token; `NO_VERSION` for the
            environment's.
        mask: [n] bool, true on tokens that the policy sampled.
        is_finished: it has its last token.
        truncated: a limit ended it.
        turns: turns of the policy that have ended.
        turn_tokens: tokens of the policy's last turn so far.
        episode: state of the environment or program; None if there is none, or not yet.
        images: those of the environment's answers, whose tokens `tokens` has.
    """

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    mask: Tensor
    is_finished: bool = False
    truncated: bool = False
    turns: int = 0
    turn_tokens: int = 0
    episode: EpisodeState | None = None
    images: tuple[ImageFile, ...] = ()

    @classmethod
    def empty(cls) -> "Response":
        """Return a response without tokens."""
        none = torch.empty(0, dtype=torch.int32)
        return cls(none, none.float(), none, none.bool())

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the policy's last turn."""
        return self.tokens[len(self) - self.turn_tokens :].tolist()

    @property
    def seed_parts(self) -> tuple[str | int, ...]:
        """Parts of the seed that differ between a response's calls: turn, and tokens so far."""
        turn = ("turn", self.turns) if self.turns else ()
        return (*turn, "after", self.turn_tokens) if self.turn_tokens else turn

    def with_sampled(
        self, tokens: Tensor, log_probs: Tensor, version: int, *, turn_ends: bool
    ) -> "Response":
        """Return this response with more tokens of a turn, sampled with weights `version`."""
        more = replace(
            self, turns=self.turns + turn_ends, turn_tokens=self.turn_tokens + len(tokens)
        )
        return more._with(tokens, log_probs, version)

    def with_answer(self, ids: Sequence[int], images: Sequence[ImageFile] = ()) -> "Response":
        """Return this response with tokens of the environment and images, before a new turn."""
        tokens, images = torch.tensor(ids, dtype=torch.int32), (*self.images, *images)
        more = replace(self, turn_tokens=0, images=images)
        return more._with(tokens, torch.zeros(len(ids)), NO_VERSION)

    def finished(self, *, truncated: bool) -> "Response":
        """Return this response as finished."""
        return replace(self, is_finished=True, truncated=truncated)

    def _with(self, tokens: Tensor, log_probs: Tensor, version: int) -> "Response":
        count = (len(tokens),)
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens]),
            log_probs=torch.cat([self.log_probs, log_probs]),
            versions=torch.cat([self.versions, torch.full(count, version, dtype=torch.int32)]),
            mask=torch.cat([self.mask, torch.full(count, version != NO_VERSION)]),
        )


@dataclass(frozen=True)
class Group:
    """All responses to one prompt.

    Attributes:
        step: in which the first tokens were sampled; seeds derive from it.
        version: number of the weights in that step; no token is older.
        engine: index of the engine that samples them.
        first_sample: index of the first response among all to this prompt in `step`.
    """

    prompt: Prompt
    step: int
    version: int
    engine: int
    responses: tuple[Response, ...]
    first_sample: int = 0

    @property
    def is_finished(self) -> bool:
        """True if all responses are finished."""
        return all(response.is_finished for response in self.responses)


# A response of several groups: index of its group, and of it in the group.
Place = tuple[int, int]


def unfinished(groups: Sequence[Group]) -> list[Place]:
    """Return the unfinished responses."""
    return [
        (g, k)
        for g, group in enumerate(groups)
        for k, response in enumerate(group.responses)
        if not response.is_finished
    ]


def with_responses(groups: Sequence[Group], new: Mapping[Place, Response]) -> list[Group]:
    """Return the groups with other responses at some places."""
    changed = {g for g, _ in new}
    return [
        replace(
            group,
            responses=tuple(new.get((g, k), one) for k, one in enumerate(group.responses)),
        )
        if g in changed
        else group
        for g, group in enumerate(groups)
    ]


def encode(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return plain JSON; numbers keep their bits."""
    return [
        {name: value for name, value in vars(group).items() if name != "prompt"}
        | {"prompt_id": group.prompt.prompt_id, "responses": [*map(_encode, group.responses)]}
        for group in groups
    ]


def decode(
    state: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> tuple[Group, ...]:
    """Return the groups of a value of `encode`; `prompt_of` finds a prompt by its id."""
    groups = []
    for one in state:
        fields = dict(one)
        prompt, responses = prompt_of(fields.pop("prompt_id")), fields.pop("responses")
        groups.append(Group(prompt, responses=tuple(map(_decode, responses)), **fields))
    return tuple(groups)


def _encode(response: Response) -> dict[str, Any]:
    state = response.episode
    episode = {"kind": state.kind, **state.encode()} if state and state.kind else None
    return {
        name: b64encode(value.numpy().astype(_DTYPES[name]).tobytes()).decode()
        if isinstance(value, Tensor)
        else value
        for name, value in vars(response).items()
    } | {"episode": episode, "images": [image.url for image in response.images]}


def _decode(state: Mapping[str, Any]) -> Response:
    arrays = {
        name: torch.from_numpy(np.frombuffer(b64decode(state[name]), dtype).copy())
        for name, dtype in _DTYPES.items()
    }
    episode = None
    if (fields := state["episode"]) is not None:
        fields = dict(fields)
        episode = locate("episode", STATES[fields.pop("kind")]).decode(fields)
    images = tuple(read_image(url, Path()) for url in state.get("images", ()))
    return Response(**{**state, **arrays, "episode": episode, "images": images})
