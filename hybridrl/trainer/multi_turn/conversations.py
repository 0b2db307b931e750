"""Generation in turns: the model writes, its environment answers, until one of them ends it.

    turn 1      all prompts, as without an environment
    turn k      every unfinished conversation: prompt = all its tokens so far, one sample each, on
                the engine that has them cached
    between     the environments answer, in processes of their own

What comes out is a rollout as of any generation: the sampled tokens and the environment's between
them, of which response_mask is false and rollout_log_probs are 0.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.data.batch import EngineStats, Generate, PromptBatch, Rollout, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.data.turns import TurnTokens
from hybridrl.environments.base import StepRequest
from hybridrl.environments.pool import EnvironmentReply
from hybridrl.rewards.messages import FailureKind
from hybridrl.trainer.multi_turn.conversation_failures import Failures


class Environments(Protocol):
    """The environments of many conversations (environments/pool.py)."""

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        """A new environment for each example, and the text it begins with."""
        ...

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        """The answers to turns of as many conversations, in order."""
        ...


@dataclass(frozen=True)
class Limits:
    """What ends a conversation that nobody has ended.

    Attributes:
        max_turns: turns of the model's.
        max_tokens: tokens after the prompt, the environment's included.
    """

    max_turns: int
    max_tokens: int


@dataclass
class _Conversation:
    """One response in the making.

    Attributes:
        prompt: index of its prompt in the request.
        sample: index among all samples of that prompt; seeds derive from it.
        state: of its environment; empty if that failed before the first turn.
        tokens, log_probs, masks: parts in their order, [n] each.
        turns: of the model's, so far.
        reward: sum of what they earned.
        failure, reason: how and why the environment failed.
        truncated: whether a limit has ended it.
        is_open: whether it goes on.
    """

    prompt: int
    sample: int
    state: str
    failure: FailureKind | None
    reason: str
    tokens: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    truncated: bool = False
    is_open: bool = True

    @property
    def length(self) -> int:
        """Tokens behind the prompt."""
        return sum(map(len, self.tokens))

    def sampled(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Take in a turn of the model's."""
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        self.masks.append(torch.ones(len(tokens), dtype=torch.bool))
        self.turns += 1

    def heard(self, ids: list[int]) -> None:
        """Take in what the environment said."""
        self.tokens.append(torch.tensor(ids, dtype=torch.int32))
        self.log_probs.append(torch.zeros(len(ids)))
        self.masks.append(torch.zeros(len(ids), dtype=torch.bool))

    def end(self, *, truncated: bool) -> None:
        """Nobody goes on."""
        self.is_open, self.truncated = False, truncated


class Conversations:
    """Generates in turns with an environment; to be called as a `Generate` is.

    Args:
        generate: samples one turn.
        environments: answer the turns.
        tokens: makes token ids of the answers.
        decode: token ids of many turns -> their texts.
        examples: prompt id -> the row of the data set.
        limits: what ends a conversation that nobody has ended.
        failures: numbers the reasons for which environments fail.
    """

    def __init__(
        self,
        generate: Generate,
        environments: Environments,
        tokens: TurnTokens,
        decode: Decode,
        examples: Mapping[int, dict[str, Any]],
        limits: Limits,
        failures: Failures,
    ) -> None:
        self._generate = generate
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._examples = examples
        self._limits = limits
        self._failures = failures
        self._seconds = 0.0

    def __call__(self, request: PromptBatch) -> Rollout:
        """Conversations from each prompt, `responses_per_prompt` of them, in its order."""
        self._seconds = 0.0
        request = replace(request, stop_token_ids=self._tokens.stop_token_ids)
        first, conversations = self._open(request)
        rollouts = [self._generate(first)]
        self._take(conversations, rollouts[0].batch)
        engine_of = rollouts[0].batch.engine
        while unfinished := [c for c in conversations if c.is_open]:
            turn = _continued(request, unfinished, len(rollouts), engine_of)
            left = [self._limits.max_tokens - c.length for c in unfinished]
            rollouts.append(self._generate(replace(turn, max_tokens=torch.tensor(left))))
            self._take(unfinished, rollouts[-1].batch)
        versions = torch.cat([rollout.batch.weight_version for rollout in rollouts])
        assert (versions == versions[0]).all(), "the weights changed within a conversation"
        return Rollout(
            replace(
                _batch(request, conversations, int(versions[0]), self._failures), engine=engine_of
            ),
            tuple(_over_turns(each) for each in zip(*(r.engines for r in rollouts), strict=True)),
            self._seconds,
        )

    def _open(self, request: PromptBatch) -> tuple[PromptBatch, list[_Conversation]]:
        """The first turn's prompts, and the conversations before it.

        All conversations of a prompt begin with the same environment and the same text.
        """
        start = time.perf_counter()
        examples = [self._examples[number] for number in request.prompt_id.tolist()]
        replies = self._environments.open(examples)
        self._seconds += time.perf_counter() - start
        openings = self._tokens.encode([reply.result.text for reply in replies])
        samples = range(request.responses_per_prompt)
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        conversations = []
        for prompt, (reply, ids) in enumerate(zip(replies, openings, strict=True)):
            failure, reason = reply.failure, reply.reason
            if len(ids) >= self._limits.max_tokens:  # nothing could be said to it
                failure, reason = FailureKind.error, _too_long(len(ids), self._limits.max_tokens)
                openings[prompt] = ids = []
            for sample in samples:
                state = "" if failure else reply.state
                new = _Conversation(prompt, int(first[prompt]) + sample, state, failure, reason)
                if ids:
                    new.heard(ids)
                conversations.append(new)
        if not any(openings):
            return request, conversations
        rows = zip(request.prompts.rows(), openings, strict=True)
        prompts = [torch.cat([row, torch.tensor(ids, dtype=torch.int32)]) for row, ids in rows]
        left = torch.tensor([self._limits.max_tokens - len(ids) for ids in openings])
        opened = Ragged.from_rows(prompts, torch.int32)
        return replace(request, prompts=opened, max_tokens=left), conversations

    def _take(self, conversations: list[_Conversation], batch: RolloutBatch) -> None:
        """Take in one turn of each conversation and its environment's answer."""
        rows = batch.responses.rows()
        fields = zip(conversations, rows, batch.rollout_log_probs.rows(), strict=True)
        for conversation, tokens, log_probs in fields:
            conversation.sampled(tokens, log_probs)
        texts = self._decode(row.tolist() for row in rows)
        asked = [i for i, c in enumerate(conversations) if c.state]
        turns = [StepRequest(conversations[i].state, texts[i]) for i in asked]
        start = time.perf_counter()
        replies = dict(zip(asked, self._environments.step(turns), strict=True))
        self._seconds += time.perf_counter() - start
        going_on = []
        for i, conversation in enumerate(conversations):
            cut = bool(batch.truncated[i])
            if i in replies and self._goes_on(conversation, replies[i], cut):
                going_on.append(i)
            elif conversation.is_open:
                conversation.end(truncated=cut)
        self._answer(
            [conversations[i] for i in going_on],
            [replies[i].result.text for i in going_on],
        )

    def _goes_on(self, conversation: _Conversation, reply: EnvironmentReply, cut: bool) -> bool:
        """Take in what a turn earned; whether there may be another."""
        conversation.state = reply.state
        conversation.failure, conversation.reason = reply.failure, reply.reason
        conversation.reward += reply.result.reward
        if reply.result.done:
            conversation.end(truncated=cut)
        elif cut or conversation.turns >= self._limits.max_turns:
            conversation.end(truncated=True)
        return conversation.is_open

    def _answer(self, conversations: list[_Conversation], texts: list[str]) -> None:
        """Let the models hear the answers, as far as these leave them a token to say."""
        last = [int(conversation.tokens[-1][-1]) for conversation in conversations]
        for conversation, ids in zip(conversations, self._tokens.answers(texts, last), strict=True):
            if conversation.length + len(ids) < self._limits.max_tokens:
                conversation.heard(ids)
            else:
                conversation.end(truncated=True)


def _too_long(opening: int, max_tokens: int) -> str:
    limit = f"rollout.max_response_tokens={max_tokens}"
    return f"its opening of {opening} tokens leaves none of {limit}"


def _continued(
    request: PromptBatch,
    conversations: Sequence[_Conversation],
    turn: int,
    engine_of: Tensor | None,
) -> PromptBatch:
    """The prompts of a later turn: each conversation's tokens so far.

    Args:
        request: of the first turn.
        conversations: those that go on.
        turn: which it is.
        engine_of: who answered in the first turn, by response; None: that is not known.
    """
    rows = request.prompts.rows()
    which = [conversation.prompt for conversation in conversations]
    first = [prompt * request.responses_per_prompt for prompt in which]
    return replace(
        request,
        prompts=Ragged.from_rows(
            [torch.cat([rows[c.prompt], *c.tokens]) for c in conversations], torch.int32
        ),
        prompt_id=request.prompt_id[which],
        responses_per_prompt=1,
        expected_tokens=None,
        first_sample=torch.tensor([conversation.sample for conversation in conversations]),
        turn=turn,
        engine=None if engine_of is None else engine_of[first],
    )


def _batch(
    request: PromptBatch, conversations: Sequence[_Conversation], version: int, failures: Failures
) -> RolloutBatch:
    which = [conversation.prompt for conversation in conversations]
    lengths = torch.tensor([conversation.length for conversation in conversations])

    def joined(parts: list[list[Tensor]]) -> Ragged:
        return Ragged(torch.cat([part for of_one in parts for part in of_one]), lengths)

    numbers = [failures.number(c.failure, c.reason) if c.failure else 0 for c in conversations]
    return RolloutBatch(
        prompts=request.prompts.select(which),
        responses=joined([c.tokens for c in conversations]),
        response_mask=joined([c.masks for c in conversations]),
        rollout_log_probs=joined([c.log_probs for c in conversations]),
        group_id=request.prompt_id[which],
        weight_version=torch.full((len(which),), version),
        truncated=torch.tensor([c.truncated for c in conversations]),
        turns=torch.tensor([c.turns for c in conversations]),
        environment_rewards=torch.tensor([c.reward for c in conversations], dtype=torch.float64),
        environment_failures=torch.tensor(numbers),
    )


def _over_turns(stats: Sequence[EngineStats]) -> EngineStats:
    """One engine over all turns; its first token is that of the first turn."""
    return EngineStats(
        tokens=sum(turn.tokens for turn in stats),
        seconds=sum(turn.seconds for turn in stats),
        first_token_s=stats[0].first_token_s,
    )
