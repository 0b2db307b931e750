"""Batches of a training step.

    Requests        [B] responses to sample in one call of the rollout engines (data/requests.py)
    RolloutBatch    [B] responses; each phase adds fields; a micro-batch is a selection of rows
    ScheduledBatch  the same and its partition over ranks and micro-batches (data/schedule.py)
    RankBatch       one rank's rows of it, and the order of its micro-batches (data/schedule.py)
    Packed          a micro-batch as one model input [1, N] (distributed/forward/packing.py)

Shapes:  B = responses   T_b = tokens of response b
         token fields are ragged [B, T_b] (data/ragged.py)
Units:   log-probs in nats; scores, rewards, values, advantages and returns in the reward's unit
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from hybridrl.data.images import ImageRows, image_rows
from hybridrl.data.ragged import Ragged, concat

PROMPTS = ("prompts", "teacher_prompts")  # ragged fields with tokens of prompts
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


# One value per token, or per response.
Values: TypeAlias = Ragged | Tensor
Kind = TypeVar("Kind")


class Added(Generic[Kind]):
    """Field of a `RolloutBatch` that a phase adds; reading it before is an error."""

    def __init__(self, kind: type[Kind]) -> None:
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: "RolloutBatch", owner: type) -> Kind:
        if self._name not in batch.added:
            raise AttributeError(
                f"the batch has no {self._name}, only {', '.join(batch.added) or 'what all have'}: "
                f"the phase that adds it has not run, or the run does without"
            )
        value: Any = batch.added[self._name]
        return value


@dataclass(frozen=True)
class ConversationOutcome:
    """Outcome of each response's conversation with an environment or program.

    Attributes:
        turns: [B] int64, of the policy.
        environment_rewards: [B] float64, sum of the rewards of its turns.
        environment_failures: [B] int64, index of the reason, from 1, for which the environment
            failed and the conversation ended; 0 otherwise.
    """

    turns: Tensor
    environment_rewards: Tensor
    environment_failures: Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """Responses of a step, with the fields that phases have added.

    Attributes:
        prompts: ragged int32, the prompt of each response.
        responses: ragged int32, sampled token ids with end tokens; in a conversation with the
            environment's tokens between them.
        response_mask: ragged bool, true on tokens the policy sampled.
        rollout_log_probs: ragged float32, log-prob of each token as vLLM reported it.
        group_id: [B] int64, responses of one prompt share it.
        weight_version: [B] int64, number of the reshard whose weights sampled the response.
        truncated: [B] bool, true if max_response_tokens cut off the response, or
            environment.max_turns the conversation.
        routed_experts: ragged uint8 (int16 from 256 experts on), [T, L, K] of each row: of all T
            tokens, prompt included, in L layers the K experts that vLLM chose, as 1 + their index;
            0 where it computed none, as for the last token. None if they were not recorded.
        kept_ids: ragged int32, the tokens to which rollout.top_p cut the distribution of each
            response token, set after set. None if they were not recorded.
        kept_counts: ragged int32, size of each response token's set.
        token_versions: ragged int32, as weight_version of each token, where responses may be
            continued over several steps; weight_version is then that of the last token.
            `NO_VERSION` for tokens that were not sampled.
        episode: [B] int64, index of the episode of each response, in rising order. An agent's
            episode may have several, with one reward, which is placed on the last. None: each
            response is an episode.
        conversation: what environments and programs say of the responses.
        images: those of each response's tokens. None if no row has any.
        added: fields that phases add, by name; read them as attributes.
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
    routed_experts: Ragged | None = None
    kept_ids: Ragged | None = None
    kept_counts: Ragged | None = None
    token_versions: Ragged | None = None
    episode: Tensor | None = None
    conversation: ConversationOutcome | None = None
    images: ImageRows | None = None
    added: Mapping[str, Values] = field(default_factory=dict)
    engines: CallStats = ()
    environment_s: float = 0.0

    # Token fields [B, T_b] are float32 where nothing else is said; others are [B].
    engine = Added(Tensor)  # int64, index of the engine that sampled the response
    unfinished = Added(Tensor)  # bool, in engines' answers: the token budget ended the response
    turn_rewards = Added(Ragged)  # parts of environment_rewards on the last tokens of turns
    scores = Added(Ragged)  # reward before the KL penalty; outcomes are on last_sampled of episodes
    baseline_rewards = Added(Tensor)  # float32, outcome of the greedy response to the same prompt
    old_log_probs = Added(Ragged)  # the actor's, before this step's updates
    current = Added(Ragged)  # bool, true on tokens of the present weights; with rollout.exact
    ref_log_probs = Added(Ragged)  # the frozen reference's
    teacher_log_probs = Added(Ragged)  # the teacher's of each response
    teacher = Added(Tensor)  # int64, index of the response's teacher, if there are several
    teacher_prompts = Added(Ragged)  # int32 [B, P_b], what teachers read in place of the prompt
    values = Added(Ragged)  # the critic's, before this step's updates
    advantages = Added(Ragged)
    returns = Added(Ragged)  # the critic's targets
    loss_mask = Added(Ragged)  # bool, true on tokens that count in the policy loss; see counted
    loss_weights = Added(Ragged)  # factor of each token's policy loss
    targets = Added(Ragged)  # int32, tokens whose log-probs are computed in the responses' place
    preferred = Added(Ragged)  # bool, true on the tokens of preferred responses
    kl_baseline = Added(Ragged)  # estimated KL of the policy against the reference, nats
    selected = Added(Ragged)  # bool, true on the tokens that clip_cov and kl_cov select
    episode_tokens = Added(Tensor)  # int64, counted tokens of each response's whole episode

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def num_tokens(self) -> Tensor:
        """[B] int64: tokens of prompt and response together."""
        return self.prompts.lengths + self.responses.lengths

    @property
    def counted(self) -> Ragged:
        """Ragged bool, true on tokens that count in the policy loss."""
        return self.loss_mask if "loss_mask" in self.added else self.response_mask

    @property
    def versions(self) -> Ragged:
        """Ragged int32: number of the weights that sampled each token."""
        if self.token_versions is not None:
            return self.token_versions
        return self.responses.like(self.responses.spread(self.weight_version.int()))

    @property
    def episode_index(self) -> Tensor:
        """[B] int64: index of the episode of each response."""
        return torch.arange(len(self)) if self.episode is None else self.episode

    @property
    def last_of_episodes(self) -> Tensor:
        """[E] int64: index of the last response of each episode."""
        return self.episode_index.unique_consecutive(return_counts=True)[1].cumsum(0) - 1

    def summed_over_episodes(self, values: Tensor) -> Tensor:
        """Return [B]: for each response the sum of `values` [B] over its episode."""
        _, index = self.episode_index.unique_consecutive(return_inverse=True)
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
        whole = self.with_rows(ends.diff(prepend=ends.new_zeros(1)), last)
        truncated = self.summed_over_episodes(self.truncated.long())[last] > 0
        return replace(whole, episode=None, truncated=truncated)

    def with_rows(self, lengths: Tensor, rows: Tensor) -> "RolloutBatch":
        """Return the same tokens as rows of other lengths; `rows` are those of the other values."""
        tensors = {
            name: Ragged(value.values, lengths)
            if isinstance(value, Ragged) and name not in PROMPTS
            else _at(rows, value)
            for name, value in self.tensors().items()
        }
        return self._with(tensors, rows)

    def select(self, indices: Sequence[int]) -> "RolloutBatch":
        """Return the responses `indices`, in that order, with all fields."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self._with({name: _at(rows, value) for name, value in self.tensors().items()}, rows)

    def _with(self, tensors: Mapping[str, Values], rows: Tensor | None = None) -> "RolloutBatch":
        images = self.images if rows is None or self.images is None else self.images.select(rows)
        others: dict[str, Any] = {"engines": self.engines, "environment_s": self.environment_s}
        return self.of(tensors, images=images, **others)

    def tensors(self) -> dict[str, Values]:
        """Return all fields with one value per response or token by name, those of parts, too."""
        named = {**vars(self), **(vars(self.conversation) if self.conversation else {})}
        own = {name: x for name, x in named.items() if isinstance(x, Ragged | Tensor)}
        return {**own, **self.added}

    @classmethod
    def of(cls, tensors: Mapping[str, Values], **others: Any) -> "RolloutBatch":
        """Return the batch that has these `tensors`; `others` are its other fields."""
        own: dict[str, Any] = dict(tensors)
        of_phases = [name for name, field in vars(cls).items() if isinstance(field, Added)]
        added = {name: own.pop(name) for name in of_phases if name in own}
        names = [field.name for field in fields(ConversationOutcome) if field.name in own]
        outcome = ConversationOutcome(**{name: own.pop(name) for name in names}) if names else None
        return cls(**own, added=added, conversation=outcome, **others)

    def adding(self, **new: Values) -> "RolloutBatch":
        """Return this batch with fields of a phase.

        Raises:
            ValueError: the lengths of a field's rows are not those of the responses.
        """
        for name, value in new.items():
            fits = name in PROMPTS or not isinstance(value, Ragged)
            if not fits and not value.lengths.equal(self.responses.lengths):
                raise ValueError(f"{name} does not have one value per response token")
        return self._with({**self.tensors(), **new})

    @classmethod
    def concat(cls, parts: Sequence["RolloutBatch"], order: Tensor | None = None) -> "RolloutBatch":
        """Concatenate parts with the same fields, without what concerns their calls.

        Each value is copied once.

        Args:
            parts: at least one.
            order: [B] int64, indices into the concatenation, to reorder it; None: unchanged.
        """
        named, joined = [part.tensors() for part in parts], dict[str, Values]()
        for name, first in named[0].items():
            values: list[Any] = [tensors[name] for tensors in named]
            if isinstance(first, Ragged):
                joined[name] = concat(values, order)
            else:
                whole = torch.cat(values)
                joined[name] = whole if order is None else whole[order]
        images = ImageRows.concat([part.images or ImageRows.none(len(part)) for part in parts])
        rows = images.rows if order is None else images.select(order).rows
        return cls.of(joined, images=image_rows(rows))


def _at(rows: Tensor, value: Values) -> Values:
    return value.select(rows) if isinstance(value, Ragged) else value[rows]


class Totals(NamedTuple):
    """Counts over a mini-batch on all ranks; losses are divided by them.

    Attributes:
        tokens: response tokens that count.
        episodes: episodes with at least one such token; without agents, responses.
    """

    tokens: int
    episodes: int
