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

from hybridrl.data.batch import Generate, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.tokenizer import Decode, TurnTokens
from hybridrl.environments.base import StepRequest
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.processes.messages import FailureKind
from hybridrl.trainer.multi_turn.environment import FailureReasons
from hybridrl.trainer.sampling.base import total_stats


@dataclass(frozen=True)
class Limits:
    """Limits of a conversation: the policy's turns, and all tokens after the prompt."""

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
        truncated: ended by a limit.
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

    def add(self, tokens: Tensor, log_probs: Tensor | None = None) -> None:
        """Append a turn of the policy or, without log-probs, text of the environment."""
        is_reply = log_probs is None
        self.tokens.append(tokens)
        self.log_probs.append(torch.zeros(len(tokens)) if log_probs is None else log_probs)
        self.masks.append(torch.full((len(tokens),), not is_reply))
        self.turns += not is_reply

    def end(self, *, truncated: bool) -> None:
        """Close the conversation."""
        self.is_open, self.truncated = False, truncated


class MultiTurn:
    """Generator of conversations with an environment.

    `sample_turn` samples one turn of the policy. `examples` has the rows of the data set by prompt.
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

    def generate(self, prompts: PromptBatch) -> RolloutBatch:
        """Generate `responses_per_prompt` conversations from each prompt, in order."""
        self._environment_s = 0.0
        request = replace(prompts, stop_token_ids=self._tokens.stop_token_ids)
        first, conversations = self._open(request)
        turns = [self._sample_turn(first)]
        self._add(conversations, turns[0])
        engine_of = turns[0].engine
        while unfinished := [c for c in conversations if c.is_open]:
            turn = _continued(request, unfinished, len(turns), engine_of)
            left = [self._limits.max_tokens - c.length for c in unfinished]
            turns.append(self._sample_turn(replace(turn, max_tokens=torch.tensor(left))))
            self._add(unfinished, turns[-1])
        versions = torch.cat([turn.weight_version for turn in turns])
        assert (versions == versions[0]).all(), "the weights changed within a conversation"
        batch = _batch(request, conversations, int(versions[0]), self._failures)
        return replace(
            batch,
            engine=engine_of,
            engines=total_stats(turns, first_token=lambda of_turns: of_turns[0]),
            environment_s=self._environment_s,
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
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        conversations = []
        for prompt, (reply, ids) in enumerate(zip(replies, openings, strict=True)):
            failure, reason = reply.failure, reply.reason
            if len(ids) >= self._limits.max_tokens:  # no room for the policy's turn
                limit = f"rollout.max_response_tokens={self._limits.max_tokens}"
                failure = FailureKind.error
                reason = f"its opening of {len(ids)} tokens leaves none of {limit}"
                openings[prompt] = ids = []
            for sample in range(request.responses_per_prompt):
                state = "" if failure else reply.state
                new = _Conversation(prompt, int(first[prompt]) + sample, state, failure, reason)
                if ids:
                    new.add(torch.tensor(ids, dtype=torch.int32))
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
            conversation.add(tokens, log_probs)
        texts = self._decode(row.tolist() for row in rows)
        asked = [i for i, c in enumerate(conversations) if c.state]
        turns = [StepRequest(conversations[i].state, texts[i]) for i in asked]
        start = time.perf_counter()
        replies = dict(zip(asked, self._environments.step(turns), strict=True))
        self._environment_s += time.perf_counter() - start
        answered = []
        for i, conversation in enumerate(conversations):
            cut = bool(batch.truncated[i])
            if i not in replies:
                conversation.end(truncated=cut)
                continue
            reply = replies[i]
            conversation.state = reply.state
            conversation.failure, conversation.reason = reply.failure, reply.reason
            conversation.reward += reply.result.reward
            if reply.result.done:
                conversation.end(truncated=cut)
            elif cut or conversation.turns >= self._limits.max_turns:
                conversation.end(truncated=True)
            else:
                answered.append((conversation, reply.result.text))
        last = [int(conversation.tokens[-1][-1]) for conversation, _ in answered]
        answers = self._tokens.answers([text for _, text in answered], last)
        for (conversation, _), ids in zip(answered, answers, strict=True):
            if conversation.length + len(ids) < self._limits.max_tokens:
                conversation.add(torch.tensor(ids, dtype=torch.int32))
            else:  # no room for another token
                conversation.end(truncated=True)


def _continued(
    request: PromptBatch,
    conversations: Sequence[_Conversation],
    turn: int,
    engine_of: Tensor | None,
) -> PromptBatch:
    """Return the request of a later turn, whose prompts are the open conversations so far.

    `engine_of` is the engine of each response in the first turn, if known.
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
