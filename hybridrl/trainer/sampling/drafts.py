"""Responses so far, of one turn or of several with an environment, and what ends their turns.

A call of the engines continues drafts until their turns end, or until its budget of tokens is
spent. Where a turn has ended, `Turns` finishes the draft or appends an environment's answer. So a
response that was cut and a conversation that goes on are the same thing: a draft that is not
finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.data.batch import NO_VERSION, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.rewards.processes.messages import FailureKind


@dataclass(frozen=True)
class Draft:
    """A response so far.

    Attributes:
        tokens: [n] int32, those of the environment between those of the policy.
        log_probs: [n] float32, nats, of each token when it was sampled; 0 for the environment's.
        versions: [n] int32, number of the weights that sampled each token; `NO_VERSION` for the
            environment's.
        mask: [n] bool, true on tokens that the policy sampled.
        finished: it has its last token.
        truncated: a limit ended it.
        turns: turns of the policy that have ended.
        turn_tokens: tokens of the policy's last turn so far.
        state: pickled environment; empty if there is none, or if it failed or has ended. Of an
            agent's episode its key and, at its end, its token sequences (agents/sampling.py).
        reward: sum of the environment's rewards.
        failure, reason: failure of the environment, if any.
    """

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    mask: Tensor
    finished: bool = False
    truncated: bool = False
    turns: int = 0
    turn_tokens: int = 0
    state: str = ""
    reward: float = 0.0
    failure: FailureKind | None = None
    reason: str = ""

    @classmethod
    def empty(cls) -> "Draft":
        """Return a response without tokens."""
        none = torch.empty(0, dtype=torch.int32)
        return cls(none, none.float(), none, none.bool())

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def turn(self) -> list[int]:
        """Tokens of the policy's last turn."""
        return self.tokens[len(self) - self.turn_tokens :].tolist()

    @property
    def seed_parts(self) -> tuple[str | int, ...]:
        """Parts of the seed that differ between a response's calls: turn, and tokens so far."""
        turn = ("turn", self.turns) if self.turns else ()
        return (*turn, "after", self.turn_tokens) if self.turn_tokens else turn

    def sampled(
        self, tokens: Tensor, log_probs: Tensor, version: int, *, turn_ends: bool
    ) -> "Draft":
        """Return this response with more tokens of a turn, sampled with weights `version`."""
        more = replace(
            self, turns=self.turns + turn_ends, turn_tokens=self.turn_tokens + len(tokens)
        )
        return more._with(tokens, log_probs, version)

    def heard(self, ids: Sequence[int]) -> "Draft":
        """Return this response with tokens of the environment, before a new turn."""
        tokens = torch.tensor(ids, dtype=torch.int32)
        return replace(self, turn_tokens=0)._with(tokens, torch.zeros(len(ids)), NO_VERSION)

    def ended(self, *, truncated: bool) -> "Draft":
        """Return this response as finished."""
        return replace(self, finished=True, truncated=truncated, state="")

    def _with(self, tokens: Tensor, log_probs: Tensor, version: int) -> "Draft":
        count = (len(tokens),)
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens]),
            log_probs=torch.cat([self.log_probs, log_probs]),
            versions=torch.cat([self.versions, torch.full(count, version, dtype=torch.int32)]),
            mask=torch.cat([self.mask, torch.full(count, version != NO_VERSION)]),
        )


class Turns(Protocol):
    """Rules of what follows a turn of the policy.

    Attributes:
        stop_token_ids: tokens that end a turn, besides the model's end tokens.
        enough: share of a call's turns after whose end the others are cut, so that answers do not
            wait for the longest turn; None: only the budget cuts.
    """

    stop_token_ids: tuple[int, ...]
    enough: float | None

    def open(self, prompt_ids: Sequence[int]) -> list[Draft]:
        """Return the beginning of a response to each prompt."""
        ...

    def answer(self, drafts: Sequence[Draft], cut: Sequence[bool]) -> list[Draft]:
        """Return responses whose turns have ended, by the length limit if `cut`, as they go on."""
        ...

    def fields(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        """Return further fields of a `RolloutBatch` of finished responses."""
        ...

    def take_seconds(self) -> float:
        """Return the seconds that answers have taken since the last call."""
        ...


class OneTurn:
    """Turns without an environment: a response is one turn."""

    stop_token_ids: tuple[int, ...] = ()
    enough: float | None = None

    def open(self, prompt_ids: Sequence[int]) -> list[Draft]:
        """Return empty responses."""
        return [Draft.empty() for _ in prompt_ids]

    def answer(self, drafts: Sequence[Draft], cut: Sequence[bool]) -> list[Draft]:
        """Finish all responses."""
        return [draft.ended(truncated=is_cut) for draft, is_cut in zip(drafts, cut, strict=True)]

    def fields(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        """Return no fields."""
        return {}

    def take_seconds(self) -> float:
        """Return 0."""
        return 0.0


def advanced(drafts: Sequence[Draft], part: RolloutBatch, turns: Turns) -> list[Draft]:
    """Return responses with the tokens of the call `part`, answered where their turn has ended."""
    is_open = [False] * len(part) if part.unfinished is None else part.unfinished.tolist()
    rows = zip(
        drafts,
        part.responses.rows(),
        part.rollout_log_probs.rows(),
        part.weight_version.tolist(),
        is_open,
        strict=True,
    )
    new = [
        draft.sampled(tokens, log_probs, version, turn_ends=not goes_on)
        for draft, tokens, log_probs, version, goes_on in rows
    ]
    ended = [index for index, goes_on in enumerate(is_open) if not goes_on]
    cut = part.truncated[ended].tolist()
    for index, draft in zip(ended, turns.answer([new[i] for i in ended], cut), strict=True):
        new[index] = draft
    return new


def batch_of(
    drafts: Sequence[Draft], prompts: Ragged, group_id: Tensor, turns: Turns
) -> RolloutBatch:
    """Return finished responses as a batch; prompts[b] and group_id[b] belong to drafts[b]."""
    return RolloutBatch(
        prompts=prompts,
        responses=Ragged.from_rows([draft.tokens for draft in drafts], torch.int32),
        response_mask=Ragged.from_rows([draft.mask for draft in drafts], torch.bool),
        rollout_log_probs=Ragged.from_rows([draft.log_probs for draft in drafts], torch.float32),
        group_id=group_id,
        weight_version=torch.tensor([int(draft.versions[-1]) for draft in drafts]),
        truncated=torch.tensor([draft.truncated for draft in drafts]),
        token_versions=Ragged.from_rows([draft.versions for draft in drafts], torch.int32),
        environment_s=turns.take_seconds(),
        **turns.fields(drafts),
    )
