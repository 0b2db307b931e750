"""Environment's part of conversations: their openings, the answers to turns, and their ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Decode, TurnTokens
from hybridrl.environments.base import EnvironmentReply, StepRequest
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.processes.messages import FailureKind
from hybridrl.trainer.episodes.environment import FailureReasons
from hybridrl.trainer.episodes.responses import Response
from hybridrl.trainer.episodes.turns import Turns


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation: the policy's turns, and all tokens after the prompt."""

    max_turns: int
    max_tokens: int


@dataclass(frozen=True)
class Conversation:
    """State of an environment between two turns, or at its end.

    Attributes:
        environment: it, pickled; empty if it has failed or ended.
        reward: sum of its rewards.
        failure, reason: its failure, if any.
    """

    kind: ClassVar[str] = "conversation"

    environment: str
    reward: float = 0.0
    failure: FailureKind | None = None
    reason: str = ""

    def encode(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {**vars(self)}

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> "Conversation":
        """Return the state of a value of `encode`."""
        failure = fields.pop("failure")
        return cls(failure=failure and FailureKind(failure), **fields)


def conversation_of(response: Response) -> Conversation:
    """Return the state of a response's environment."""
    assert isinstance(response.episode, Conversation)
    return response.episode


class Conversations(Turns):
    """Turns of conversations with an environment."""

    enough: float | None = 0.5

    def __init__(
        self,
        environments: EnvironmentPool,
        tokens: TurnTokens,
        decode: Decode,
        limits: Limits,
        failures: FailureReasons,
    ) -> None:
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._limits = limits
        self._failures = failures
        self._seconds = 0.0
        self.stop_token_ids = tokens.stop_token_ids

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return the beginning of a conversation to each prompt, which its samples share."""
        replies = self._timed(self._environments.open, [prompt.example for prompt in prompts])
        openings = self._tokens.encode([reply.result.text for reply in replies])
        return [self._opened(*opened) for opened in zip(replies, openings, strict=True)]

    def next(self, responses: Sequence[Response], cut: Sequence[bool]) -> list[Response]:
        """Judge turns that have ended; append the answers where the conversations go on."""
        texts = self._decode(response.last_turn for response in responses)
        states = [conversation_of(response).environment for response in responses]
        asked = [index for index, state in enumerate(states) if state]
        turns = [StepRequest(states[index], texts[index]) for index in asked]
        replies = dict(zip(asked, self._timed(self._environments.step, turns), strict=True))
        new = [
            self._judged(response, replies.get(index), is_cut)
            for index, (response, is_cut) in enumerate(zip(responses, cut, strict=True))
        ]
        going = [index for index, response in enumerate(new) if not response.is_finished]
        answers = [replies[index].result.text for index in going]
        last = [int(new[index].tokens[-1]) for index in going]
        for index, ids in zip(going, self._tokens.answers(answers, last), strict=True):
            has_room = len(new[index]) + len(ids) < self._limits.max_tokens
            new[index] = new[index].with_answer(ids) if has_room else _ended(new[index], cut=True)
        return new

    def fields(self, responses: Sequence[Response]) -> dict[str, Any]:
        """Return the turns, rewards and failures of finished conversations."""
        states, number = [*map(conversation_of, responses)], self._failures.number
        rewards = [state.reward for state in states]
        failures = [number(one.failure, one.reason) if one.failure else 0 for one in states]
        return {
            "turns": torch.tensor([response.turns for response in responses]),
            "environment_rewards": torch.tensor(rewards, dtype=torch.float64),
            "environment_failures": torch.tensor(failures),
        }

    def take_seconds(self) -> float:
        """Return the seconds that the environments have taken since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _opened(self, reply: EnvironmentReply, ids: list[int]) -> Response:
        state = Conversation(reply.state, 0.0, reply.failure, reply.reason)
        if len(ids) >= self._limits.max_tokens:  # no room for the policy's turn
            limit = f"rollout.max_response_tokens={self._limits.max_tokens}"
            reason = f"its opening of {len(ids)} tokens leaves none of {limit}"
            state, ids = Conversation("", 0.0, FailureKind.error, reason), []
        state = replace(state, environment="") if state.failure else state
        return replace(Response.empty().with_answer(ids), episode=state)

    def _judged(self, response: Response, reply: EnvironmentReply | None, cut: bool) -> Response:
        """Return a conversation with the reply to its turn, if its environment has not failed."""
        if reply is None:
            return _ended(response, cut=cut)
        reward = conversation_of(response).reward + reply.result.reward
        state = Conversation(reply.state, reward, reply.failure, reply.reason)
        response = replace(response, episode=state)
        if reply.result.done:
            return _ended(response, cut=cut)
        is_last = cut or response.turns >= self._limits.max_turns
        return _ended(response, cut=True) if is_last else response

    def _timed(
        self, function: Callable[[Any], list[EnvironmentReply]], items: Sequence[Any]
    ) -> list[EnvironmentReply]:
        start = time.perf_counter()
        replies = function(items)
        self._seconds += time.perf_counter() - start
        return replies


def _ended(response: Response, *, cut: bool) -> Response:
    """Return a conversation as finished, without its environment."""
    state = replace(conversation_of(response), environment="")
    return replace(response, episode=state).finished(truncated=cut)
