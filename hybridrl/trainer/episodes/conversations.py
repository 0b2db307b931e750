"""Environment's part of conversations: their openings, the answers to turns, and their ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from hybridrl.config.errors import Problem, raised_problems
from hybridrl.config.schema import EnvironmentConfig, ModelConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import ConversationOutcome, RolloutBatch
from hybridrl.data.images import PromptImages
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import NO_OPTIONS, Decode, load_tokenizer
from hybridrl.data.sources.turns import TurnTokens
from hybridrl.environments.base import (
    EnvironmentPool,
    EnvironmentReply,
    StepRequest,
    StepResult,
)
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.processes.messages import Failure, FailureKind
from hybridrl.trainer.episodes.answers import AnswerImages, files_of
from hybridrl.trainer.episodes.base import Episodes, Wanted
from hybridrl.trainer.episodes.responses import EpisodeState, Response
from hybridrl.trainer.episodes.turns import Turns
from hybridrl.trainer.rewarding import Rewarded

# Distinct reasons of failures that are kept; an unbounded number could be one per conversation.
MAX_REASONS = 1000
MANY = "for one of many reasons; the log has the first of them"


class FailureReasons:
    """Numbered reasons of environment failures since the run began.

    ConversationOutcome.environment_failures holds one number per response, 0 for no failure.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[FailureKind, str], int] = {}

    def number(self, kind: FailureKind, reason: str) -> int:
        """Return the number of a reason, a new one for a new reason."""
        if (kind, reason) not in self._numbers and len(self._numbers) >= MAX_REASONS:
            reason = MANY
        return self._numbers.setdefault((kind, reason), len(self._numbers) + 1)

    def look_up(self, number: int) -> tuple[FailureKind, str]:
        """Return the kind and reason of a number above 0."""
        return list(self._numbers)[number - 1]


@dataclass(frozen=True)
class Environment:
    """Environment or agent of a run, whose processes are running.

    Attributes:
        episodes: opens its episodes on the engines; what they open ends with the stack.
        failures: those that generation met in them.
        engines: chooses the engine of each prompt among a number of them.
    """

    episodes: Callable[[WorkerGroup, Decode, ExitStack], Episodes]
    failures: FailureReasons
    engines: Callable[[Wanted, int], list[int]]


class EnvironmentRewards:
    """Rewards that responses earned from an environment while they were generated.

    Generation fills `failures`. A response whose environment failed has `failed_score`.
    """

    def __init__(self, decode: Decode, failures: FailureReasons, failed_score: float) -> None:
        self._decode = decode
        self._failures = failures
        self._failed_score = failed_score

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """Return each conversation's text and its sum of rewards."""
        outcome = batch.conversation
        assert outcome is not None, "no environment"
        failures = [
            Failure(index, *self._failures.look_up(number), traceback="")
            for index, number in enumerate(outcome.environment_failures.tolist())
            if number
        ]
        scores = outcome.environment_rewards.tolist()
        for failure in failures:
            scores[failure.index] = self._failed_score
        texts = self._decode(row.tolist() for row in batch.responses.rows())
        return Rewarded(texts, scores, failures)


def turn_tokens(
    model: ModelConfig, config: EnvironmentConfig, options: Mapping[str, Any] = NO_OPTIONS
) -> TurnTokens:
    """Return the turn encoder of a model, with the stop strings of the config.

    `options` are further arguments of the chat template.

    Raises:
        ConfigError: there is no such model, or a stop string is not one token of it.
    """
    ends = stop_token_ids(plain_folder(model.path))
    return TurnTokens(load_tokenizer(model), ends, config.stop, config.role, options)


def stop_problems(model: ModelConfig, config: EnvironmentConfig) -> list[Problem]:
    """Return the problems of environment.stop with a model."""
    return raised_problems(turn_tokens, model, config)


# A reply, and its answer with the images read.
Answered = tuple[EnvironmentReply, str]


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation: the policy's turns, and all tokens after the prompt."""

    max_turns: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Conversation(EpisodeState):
    """State of a conversation between two turns: its environment, pickled; "" at its end."""

    kind: ClassVar[str] = "conversation"

    environment: str = ""


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
        images: AnswerImages,
    ) -> None:
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._limits = limits
        self._failures = failures
        self._images = images
        self._seconds = 0.0
        self.stop_token_ids = tokens.stop_token_ids

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return the beginning of a conversation to each prompt, which its samples share."""
        replies = self._timed(self._environments.open, [prompt.example for prompt in prompts])
        openings = self._tokens.encode([answer for _, answer in replies])
        return [self._opened(*opened) for opened in zip(replies, openings, strict=True)]

    def next(self, responses: Sequence[Response], cut: Sequence[bool]) -> list[Response]:
        """Judge turns that have ended; append the answers where the conversations go on."""
        texts = self._decode(response.last_turn for response in responses)
        states = [conversation_of(response).environment for response in responses]
        asked = [index for index, state in enumerate(states) if state]
        turns = [StepRequest(states[index], texts[index]) for index in asked]
        replies = dict(zip(asked, self._timed(self._environments.step, turns), strict=True))
        new = [
            self._judged(response, replies[index][0] if index in replies else None, is_cut)
            for index, (response, is_cut) in enumerate(zip(responses, cut, strict=True))
        ]
        going = [index for index, response in enumerate(new) if not response.is_finished]
        answers = [replies[index][1] for index in going]
        last = [int(new[index].tokens[-1]) for index in going]
        for index, ids in zip(going, self._tokens.answers(answers, last), strict=True):
            new[index] = self._answered(new[index], ids, replies[index][1])
        return new

    def images(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[PromptImages | None]:
        """Return the images of prompts and answers, where responses have answers with some."""
        return self._images.processed(prompts, responses)

    def outcome(self, responses: Sequence[Response]) -> ConversationOutcome:
        """Return the turns, rewards and failures of finished conversations."""
        states, number = [*map(conversation_of, responses)], self._failures.number
        rewards = [state.reward for state in states]
        failures = [number(one.failure, one.reason) if one.failure else 0 for one in states]
        return ConversationOutcome(
            torch.tensor([response.turns for response in responses]),
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(failures),
        )

    def take_seconds(self) -> float:
        """Return the seconds that the environments have taken since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _opened(self, answered: Answered, ids: list[int]) -> Response:
        reply, answer = answered
        try:
            ids = self._images.expanded(ids, answer)
            if len(ids) >= self._limits.max_tokens:  # no room for the policy's turn
                limit = f"rollout.max_response_tokens={self._limits.max_tokens}"
                raise ValueError(f"its opening of {len(ids)} tokens leaves none of {limit}")
        except ValueError as error:
            reply, ids, answer = _failed(str(error)), [], ""
        state = Conversation(environment=reply.state, failure=reply.failure, reason=reply.reason)
        return replace(Response.empty().with_answer(ids, files_of(answer)), episode=state)

    def _answered(self, response: Response, ids: list[int], answer: str) -> Response:
        """Return a conversation that goes on with an answer, or has no room for it."""
        try:
            ids = self._images.expanded(ids, answer)
        except ValueError as error:
            return self._judged(response, _failed(str(error)), cut=False)
        has_room = len(response) + len(ids) < self._limits.max_tokens
        return (
            response.with_answer(ids, files_of(answer)) if has_room else _ended(response, cut=True)
        )

    def _judged(self, response: Response, reply: EnvironmentReply | None, cut: bool) -> Response:
        """Return a conversation with the reply to its turn, if its environment has not failed."""
        if reply is None:
            return _ended(response, cut=cut)
        reward = conversation_of(response).reward + reply.result.reward
        state = Conversation(
            environment=reply.state, reward=reward, failure=reply.failure, reason=reply.reason
        )
        response = replace(response, episode=state)
        if reply.result.done:
            return _ended(response, cut=cut)
        is_last = cut or response.turns >= self._limits.max_turns
        return _ended(response, cut=True) if is_last else response

    def _read(self, reply: EnvironmentReply) -> Answered:
        """Return a reply and its answer; as failed, if the answer cannot be read."""
        try:
            return reply, "" if reply.result.done else self._images.read(reply.result.text)
        except ValueError as error:
            return _failed(str(error)), ""

    def _timed(
        self, function: Callable[[Any], list[EnvironmentReply]], items: Sequence[Any]
    ) -> list[Answered]:
        start = time.perf_counter()
        replies = [*map(self._read, function(items))]
        self._seconds += time.perf_counter() - start
        return replies


def _failed(reason: str) -> EnvironmentReply:
    return EnvironmentReply("", StepResult("", 0.0, True), FailureKind.error, reason)


def _ended(response: Response, *, cut: bool) -> Response:
    """Return a conversation as finished, without its environment."""
    state = replace(conversation_of(response), environment="")
    return replace(response, episode=state).finished(truncated=cut)
