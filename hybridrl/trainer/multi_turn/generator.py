"""Multi-turn generation: the policy and an environment take turns, until a limit or the end.

    turn 1      all prompts, as in single-turn generation
    turn k      every open conversation: prompt = all its tokens so far, one sample, on the
                engine that has them cached
    between     the environments reply, in their own processes

The result is a rollout like any other. It holds the sampled tokens and, between them, those of the
environment, where response_mask is false and rollout_log_probs are 0.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.data.batch import EngineStats, Generate, PromptBatch, Rollout, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.tokenizer import Decode, TurnTokens
from hybridrl.environments.base import StepRequest
from hybridrl.environments.pool import EnvironmentPool, EnvironmentReply
from hybridrl.rewards.messages import FailureKind
from hybridrl.trainer.multi_turn.environment import FailureReasons


@dataclass(frozen=True)
class Limits:
    """Limits that end a conversation.

    Attributes:
        max_turns: turns of the policy.
        max_tokens: tokens after the prompt, those of the environment included.
    """

    max_turns: int
    max_tokens: int


@dataclass
class _Conversation:
    """State of an unfinished response.

    Attributes:
        prompt: index of its prompt in the request.
        sample: index among all samples of that prompt; seeds derive from it.
        state: of its environment; empty if that failed before the first turn.
        tokens, log_probs, masks: parts in their order, [n] each.
        turns: of the policy, so far.
        reward: sum over the turns.
        failure, reason: of the environment.
        truncated: ended by a limit.
        is_open: more turns may follow.
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
        """Tokens after the prompt."""
        return sum(map(len, self.tokens))

    def add_turn(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Append a turn of the policy."""
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        self.masks.append(torch.ones(len(tokens), dtype=torch.bool))
        self.turns += 1

    def add_reply(self, ids: list[int]) -> None:
        """Append text of the environment."""
        self.tokens.append(torch.tensor(ids, dtype=torch.int32))
        self.log_probs.append(torch.zeros(len(ids)))
        self.masks.append(torch.zeros(len(ids), dtype=torch.bool))

    def end(self, *, truncated: bool) -> None:
        """Close the conversation."""
        self.is_open, self.truncated = False, truncated


class MultiTurn:
    """Generator of conversations with an environment.

    Args:
        sample_turn: samples one turn of the policy.
        environments: reply to turns.
        tokens: encodes replies.
        decode: token ids of many turns -> their texts.
        examples: prompt id -> the row of the data set.
        limits: end a conversation that neither side has ended.
        failures: numbers the reasons of failures.
    """

    def __init__(
        self,
        sample_turn: Generate,
        environments: EnvironmentPool,
        tokens: TurnTokens,
        decode: Decode,
        examples: Mapping[int, dict[str, Any]],
        limits: Limits,
        failures: FailureReasons,
    ) -> None:
        self._sample_turn = sample_turn
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._examples = examples
        self._limits = limits
        self._failures = failures
        self._environment_s = 0.0

    def generate(self, prompts: PromptBatch) -> Rollout:
        """Generate `responses_per_prompt` conversations from each prompt, in order."""
        self._environment_s = 0.0
        request = replace(prompts, stop_token_ids=self._tokens.stop_token_ids)
        first, conversations = self._open(request)
        rollouts = [self._sample_turn(first)]
        self._add(conversations, rollouts[0].batch)
        engine_of = rollouts[0].batch.engine
        while unfinished := [c for c in conversations if c.is_open]:
            turn = _continued(request, unfinished, len(rollouts), engine_of)
            left = [self._limits.max_tokens - c.length for c in unfinished]
            rollouts.append(self._sample_turn(replace(turn, max_tokens=torch.tensor(left))))
            self._add(unfinished, rollouts[-1].batch)
        versions = torch.cat([rollout.batch.weight_version for rollout in rollouts])
        assert (versions == versions[0]).all(), "the weights changed within a conversation"
        batch = _batch(request, conversations, int(versions[0]), self._failures)
        return Rollout(
            replace(batch, engine=engine_of),
            tuple(_over_turns(each) for each in zip(*(r.engines for r in rollouts), strict=True)),
            self._environment_s,
        )

    def _open(self, request: PromptBatch) -> tuple[PromptBatch, list[_Conversation]]:
        """Return the request of the first turn, and the conversations before it.

        All conversations of a prompt begin with the same environment and the same text.
        """
        start = time.perf_counter()
        examples = [self._examples[number] for number in request.prompt_id.tolist()]
        replies = self._environments.open(examples)
        self._environment_s += time.perf_counter() - start
        openings = self._tokens.encode([reply.result.text for reply in replies])
        samples = range(request.responses_per_prompt)
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        conversations = []
        for prompt, (reply, ids) in enumerate(zip(replies, openings, strict=True)):
            failure, reason = reply.failure, reply.reason
            if len(ids) >= self._limits.max_tokens:  # no room for the policy's turn
                failure, reason = FailureKind.error, _too_long(len(ids), self._limits.max_tokens)
                openings[prompt] = ids = []
            for sample in samples:
                state = "" if failure else reply.state
                new = _Conversation(prompt, int(first[prompt]) + sample, state, failure, reason)
                if ids:
                    new.add_reply(ids)
                conversations.append(new)
        if not any(openings):
            return request, conversations
        rows = zip(request.prompts.rows(), openings, strict=True)
        prompts = [torch.cat([row, torch.tensor(ids, dtype=torch.int32)]) for row, ids in rows]
        left = torch.tensor([self._limits.max_tokens - len(ids) for ids in openings])
        opened = Ragged.from_rows(prompts, torch.int32)
        return replace(request, prompts=opened, max_tokens=left), conversations

    def _add(self, conversations: list[_Conversation], batch: RolloutBatch) -> None:
        """Add one turn to each conversation, and the reply of its environment."""
        rows = batch.responses.rows()
        fields = zip(conversations, rows, batch.rollout_log_probs.rows(), strict=True)
        for conversation, tokens, log_probs in fields:
            conversation.add_turn(tokens, log_probs)
        texts = self._decode(row.tolist() for row in rows)
        asked = [i for i, c in enumerate(conversations) if c.state]
        turns = [StepRequest(conversations[i].state, texts[i]) for i in asked]
        start = time.perf_counter()
        replies = dict(zip(asked, self._environments.step(turns), strict=True))
        self._environment_s += time.perf_counter() - start
        going_on = []
        for i, conversation in enumerate(conversations):
            cut = bool(batch.truncated[i])
            if i in replies and self._goes_on(conversation, replies[i], cut):
                going_on.append(i)
            elif conversation.is_open:
                conversation.end(truncated=cut)
        self._add_replies(
            [conversations[i] for i in going_on],
            [replies[i].result.text for i in going_on],
        )

    def _goes_on(self, conversation: _Conversation, reply: EnvironmentReply, cut: bool) -> bool:
        """Add the reward of a turn; return true if another turn may follow."""
        conversation.state = reply.state
        conversation.failure, conversation.reason = reply.failure, reply.reason
        conversation.reward += reply.result.reward
        if reply.result.done:
            conversation.end(truncated=cut)
        elif cut or conversation.turns >= self._limits.max_turns:
            conversation.end(truncated=True)
        return conversation.is_open

    def _add_replies(self, conversations: list[_Conversation], texts: list[str]) -> None:
        """Add replies that leave room for another token; end the other conversations."""
        last = [int(conversation.tokens[-1][-1]) for conversation in conversations]
        for conversation, ids in zip(conversations, self._tokens.answers(texts, last), strict=True):
            if conversation.length + len(ids) < self._limits.max_tokens:
                conversation.add_reply(ids)
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
    """Return the request of a later turn, whose prompts are the conversations so far.

    Args:
        request: of the first turn.
        conversations: those that are open.
        turn: its index.
        engine_of: engine of each response in the first turn; None: unknown.
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
    request: PromptBatch,
    conversations: Sequence[_Conversation],
    version: int,
    failures: FailureReasons,
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
    """Sum one engine over all turns; its first token is that of the first turn."""
    return EngineStats(
        tokens=sum(turn.tokens for turn in stats),
        seconds=sum(turn.seconds for turn in stats),
        first_token_s=stats[0].first_token_s,
    )
