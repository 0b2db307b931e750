"""Batches of a training step.

    Requests        [B] responses to sample in one call of the rollout engines (data/requests.py)
    RolloutBatch    [B] responses; each phase fills in fields; a micro-batch is a selection of rows
    ScheduledBatch  the same and its partition over ranks and micro-batches (data/schedule.py)
    RankBatch       one rank's rows of it, and the order of its micro-batches (data/schedule.py)
    Packed          a micro-batch as one model input [1, N] (distributed/forward/packing.py)

Shapes:  B = responses   T_b = tokens of response b
         token fields are ragged [B, T_b] (data/ragged.py)
Units:   log-probs in nats; scores, rewards, values, advantages and returns in the reward's unit
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.data.ragged import Ragged, concat

# Version of tokens that no weights have sampled.
NO_VERSION = -1


@dataclass(frozen=True)
class EngineStats:
    """Throughput and latency of one engine in one call.

    Attributes:
        tokens: sampled, over all its responses.
        seconds: from the call to the last token.
        first_token_s: from the call to the first token; 0 where it sampled none.
        old_kv_tokens: of `tokens`, in responses that were held over a change of the weights.
    """

    tokens: int
    seconds: float
    first_token_s: float
    old_kv_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second; 0 if there were none."""
        return self.tokens / self.seconds if self.tokens else 0.0


# Throughput of each engine in a call.
CallStats = tuple[EngineStats, ...]


def total_stats(
    calls: Sequence[CallStats], first_token: Callable[[Sequence[float]], float] = itemgetter(0)
) -> CallStats:
    """Sum each engine over calls; `first_token` picks among the times of its first tokens."""
    return tuple(
        EngineStats(
            tokens=sum(stats.tokens for stats in of_engine),
            seconds=sum(stats.seconds for stats in of_engine),
            first_token_s=first_token([stats.first_token_s for stats in of_engine]),
            old_kv_tokens=sum(stats.old_kv_tokens for stats in of_engine),
        )
        for of_engine in zip(*calls, strict=True)
    )


@dataclass(frozen=True)
class RolloutBatch:
    """Responses of a step; a field is None until its phase has filled it in.

    Attributes:
        prompts: ragged int32, the prompt of each response.
        responses: ragged int32, sampled token ids with end tokens; in a conversation with the
            environment's tokens between them.
        response_mask: ragged bool, true on tokens the policy sampled.
        rollout_log_probs: ragged float32, log-prob of each token as vLLM reported it.
        routed_experts: ragged `expert_dtype`, [T, L, K] of each row: of all T tokens, prompt
            included, in L layers the K experts that vLLM chose, as 1 + their index; 0 where it
            computed none, as for the last token. None if they were not recorded.
        group_id: [B] int64, responses of one prompt share it.
        weight_version: [B] int64, number of the reshard whose weights sampled the response.
        truncated: [B] bool, true if max_response_tokens cut off the response, or
            environment.max_turns the conversation.
        unfinished: [B] bool, true where the token budget ended the response; None without one.
        token_versions: ragged int32, as weight_version of each token, where responses may be
            continued over several steps; weight_version is then that of the last token.
            `NO_VERSION` for tokens that were not sampled.
        engine: [B] int64, index of the engine that sampled the response; None within an engine.
        episode: [B] int64, index of the episode of each response, in rising order. An agent's
            episode may have several, with one reward, which is placed on the last. None: each
            response is an episode.
        episode_tokens: [B] int64, tokens of each response's whole episode that count in the policy
            loss; None: each response is an episode.
        turns: [B] int64, turns of the policy in each conversation.
        environment_rewards: [B] float64, sum of the rewards of each conversation's turns.
        environment_failures: [B] int64, index of the reason, from 1, for which the environment
            failed and the conversation ended; 0 otherwise.
        turn_rewards: ragged float32, parts of environment_rewards on the last tokens of turns.
        scores: ragged float32, reward before the KL penalty; an outcome is on the token
            `last_sampled` of its episode.
        old_log_probs: ragged float32, the actor's, before this step's updates.
        ref_log_probs: ragged float32, the frozen reference's.
        values: ragged float32, the critic's, before this step's updates.
        advantages: ragged float32.
        returns: ragged float32, the critic's targets.
        baseline_rewards: [B] float32, outcome of the greedy response to the same prompt (ReMax).
        loss_mask: ragged bool, true on tokens that count in the policy loss; None: response_mask.
        loss_weights: ragged float32, factor of each token's policy loss; None: 1.
        selected: ragged bool, true on the tokens that clip_cov and kl_cov select.
        engines: throughput in the call that sampled them: of an engine, or of all in their order.
        environment_s: seconds that the engines waited for the environments in that call.
    """

    prompts: Ragged
    responses: Ragged
    response_mask: Ragged
    rollout_log_probs: Ragged
    group_id: Tensor
    weight_version: Tensor
    truncated: Tensor
    unfinished: Tensor | None = None
    routed_experts: Ragged | None = None
    token_versions: Ragged | None = None
    engine: Tensor | None = None
    episode: Tensor | None = None
    episode_tokens: Tensor | None = None
    turns: Tensor | None = None
    environment_rewards: Tensor | None = None
    environment_failures: Tensor | None = None
    turn_rewards: Ragged | None = None
    scores: Ragged | None = None
    old_log_probs: Ragged | None = None
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None
    advantages: Ragged | None = None
    returns: Ragged | None = None
    baseline_rewards: Tensor | None = None
    loss_mask: Ragged | None = None
    loss_weights: Ragged | None = None
    selected: Ragged | None = None
    engines: CallStats = ()
    environment_s: float = 0.0

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def num_tokens(self) -> Tensor:
        """[B] int64: tokens of prompt and response together."""
        return self.prompts.lengths + self.responses.lengths

    @property
    def counted(self) -> Ragged:
        """Ragged bool, true on tokens that count in the policy loss."""
        return self.response_mask if self.loss_mask is None else self.loss_mask

    @property
    def last_of_episodes(self) -> Tensor:
        """[E] int64: index of the last response of each episode."""
        if self.episode is None:
            return torch.arange(len(self))
        return self._episode_sizes.cumsum(0) - 1

    @property
    def _episode_sizes(self) -> Tensor:
        """[E] int64: responses of each episode."""
        assert self.episode is not None
        return self.episode.unique_consecutive(return_counts=True)[1]

    def summed_over_episodes(self, values: Tensor) -> Tensor:
        """Return [B]: for each response the sum of `values` [B] over its episode."""
        if self.episode is None:
            return values
        _, index = self.episode.unique_consecutive(return_inverse=True)
        return torch.zeros_like(values).index_add(0, index, values)[index]

    @property
    def last_sampled(self) -> Tensor:
        """[B] int64: index of each response's last sampled token; of its last if there is none."""
        lasts, rows = self.responses.lengths.cumsum(0) - 1, self.response_mask.rows()
        for row in (~self.response_mask.values[lasts]).nonzero().flatten().tolist():
            sampled = rows[row].nonzero()
            if len(sampled):
                lasts[row] -= len(rows[row]) - 1 - int(sampled[-1])
        return lasts

    def by_episode(self) -> "RolloutBatch":
        """Return this batch with the tokens of each episode as one response, in the same order.

        It is truncated if one of its responses is; prompts stay those of the last one.
        """
        if self.episode is None:
            return self
        last = self.last_of_episodes
        ends = self.responses.lengths.cumsum(0)[last]
        found = self.with_rows(ends.diff(prepend=ends.new_zeros(1)), last)
        truncated = [part.any() for part in self.truncated.split(self._episode_sizes.tolist())]
        return replace(found, episode=None, truncated=torch.stack(truncated))

    def with_rows(self, lengths: Tensor, rows: Tensor) -> "RolloutBatch":
        """Return the same tokens as rows of other lengths; `rows` are those of the other values."""
        fields: dict[str, Any] = {
            name: value[rows]
            if isinstance(value, Tensor)
            else value.select(rows)
            if name == "prompts"
            else Ragged(value.values, lengths)
            for name, value in self.tensors().items()
        }
        return replace(self, **fields)

    def select(self, indices: Sequence[int]) -> "RolloutBatch":
        """Return the responses `indices`, in that order, with all fields."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        selected: dict[str, Any] = {
            name: value.select(rows) if isinstance(value, Ragged) else value[rows]
            for name, value in self.tensors().items()
        }
        return replace(self, **selected)

    def tensors(self) -> dict[str, Ragged | Tensor]:
        """Return the fields with one value per response or token that are filled in."""
        named = vars(self).items()
        return {name: value for name, value in named if isinstance(value, Ragged | Tensor)}

    def adding(self, **new: Any) -> "RolloutBatch":
        """Return this batch with ragged fields filled in.

        Raises:
            ValueError: the lengths of a field's rows are not those of the responses.
        """
        for name, value in new.items():
            if not torch.equal(value.lengths, self.responses.lengths):
                raise ValueError(f"{name} does not have one value per response token")
        return replace(self, **new)

    @classmethod
    def concat(cls, parts: Sequence["RolloutBatch"], order: Tensor | None = None) -> "RolloutBatch":
        """Concatenate parts with the same fields, without what concerns their calls.

        Each value is copied once.

        Args:
            parts: at least one.
            order: [B] int64, indices into the concatenation, to reorder it; None: unchanged.
        """
        joined: dict[str, Any] = {}
        for name, first in parts[0].tensors().items():
            values = [getattr(part, name) for part in parts]
            if isinstance(first, Ragged):
                joined[name] = concat(values, order)
            else:
                whole = torch.cat(values)
                joined[name] = whole if order is None else whole[order]
        return cls(**joined)


def expert_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype of `RolloutBatch.routed_experts`."""
    return torch.uint8 if num_experts < 256 else torch.int16


class Totals(NamedTuple):
    """Counts over a mini-batch on all ranks; losses are divided by them.

    Attributes:
        tokens: response tokens that count.
        episodes: episodes with at least one such token; without agents, responses.
    """

    tokens: int
    episodes: int
