"""Environment's part of conversations: their openings, the answers to turns, and their ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridrl.data.sources.tokenizer import Decode, TurnTokens
from hybridrl.environments.base import EnvironmentReply, StepRequest
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.processes.messages import FailureKind
from hybridrl.trainer.multi_turn.environment import FailureReasons
from hybridrl.trainer.sampling.drafts import Draft


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation: the policy's turns, and all tokens after the prompt."""

    max_turns: int
    max_tokens: int


class Conversations:
    """`Turns` of conversations with an environment.

    `examples` has the rows of the data set by prompt.
    """

    enough: float | None = 0.5

    def __init__(
        self,
        environments: EnvironmentPool,
        tokens: TurnTokens,
        decode: Decode,
        examples: Mapping[int, dict[str, Any]],
        limits: Limits,
        failures: FailureReasons,
    ) -> None:
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._examples = examples
        self._failures = failures
        self._seconds = 0.0
        self.limits = limits
        self.stop_token_ids = tokens.stop_token_ids

    def open(self, prompt_ids: Sequence[int]) -> list[Draft]:
        """Return the beginning of a conversation to each prompt, which its samples share."""
        examples = [self._examples[number] for number in prompt_ids]
        replies = self._timed(self._environments.open, examples)
        openings = self._tokens.encode([reply.result.text for reply in replies])
        return [self._opened(*opened) for opened in zip(replies, openings, strict=True)]

    def answer(self, drafts: Sequence[Draft], cut: Sequence[bool]) -> list[Draft]:
        """Judge turns that have ended; append the answers where the conversations go on."""
        texts = self._decode(draft.turn for draft in drafts)
        asked = [index for index, draft in enumerate(drafts) if draft.state]
        turns = [StepRequest(drafts[index].state, texts[index]) for index in asked]
        replies = dict(zip(asked, self._timed(self._environments.step, turns), strict=True))
        new = [
            self._judged(draft, replies.get(index), is_cut)
            for index, (draft, is_cut) in enumerate(zip(drafts, cut, strict=True))
        ]
        going = [index for index, draft in enumerate(new) if not draft.finished]
        heard = [replies[index].result.text for index in going]
        last = [int(new[index].tokens[-1]) for index in going]
        for index, ids in zip(going, self._tokens.answers(heard, last), strict=True):
            has_room = len(new[index]) + len(ids) < self.limits.max_tokens
            new[index] = new[index].heard(ids) if has_room else new[index].ended(truncated=True)
        return new

    def fields(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        """Return the turns, rewards and failures of finished conversations."""
        number = self._failures.number
        failures = [number(d.failure, d.reason) if d.failure else 0 for d in drafts]
        return {
            "turns": torch.tensor([draft.turns for draft in drafts]),
            "environment_rewards": torch.tensor([d.reward for d in drafts], dtype=torch.float64),
            "environment_failures": torch.tensor(failures),
        }

    def take_seconds(self) -> float:
        """Return the seconds that the environments have taken since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _opened(self, reply: EnvironmentReply, ids: list[int]) -> Draft:
        failure, reason = reply.failure, reply.reason
        if len(ids) >= self.limits.max_tokens:  # no room for the policy's turn
            limit = f"rollout.max_response_tokens={self.limits.max_tokens}"
            failure = FailureKind.error
            reason = f"its opening of {len(ids)} tokens leaves none of {limit}"
            ids = []
        state = "" if failure else reply.state
        return replace(Draft.empty().heard(ids), state=state, failure=failure, reason=reason)

    def _judged(self, draft: Draft, reply: EnvironmentReply | None, is_cut: bool) -> Draft:
        """Return a conversation with the reply to its turn, if its environment has not failed."""
        if reply is None:
            return draft.ended(truncated=is_cut)
        draft = replace(
            draft,
            state=reply.state,
            reward=draft.reward + reply.result.reward,
            failure=reply.failure,
            reason=reply.reason,
        )
        if reply.result.done:
            return draft.ended(truncated=is_cut)
        is_last = is_cut or draft.turns >= self.limits.max_turns
        return draft.ended(truncated=True) if is_last else draft

    def _timed(
        self, function: Callable[[Any], list[EnvironmentReply]], items: Sequence[Any]
    ) -> list[EnvironmentReply]:
        start = time.perf_counter()
        replies = function(items)
        self._seconds += time.perf_counter() - start
        return replies
