"""The batch of recorded episodes: one response per token sequence, rewards of turns placed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch

from hybridrl.agents.images import RequestImages
from hybridrl.agents.record import EpisodeRecord, Images, TokenSequence, digest_of
from hybridrl.data.batch import ConversationOutcome, RolloutBatch
from hybridrl.data.ragged import Ragged


class EpisodeResult(NamedTuple):
    """An episode: its group, tokens and reward; `failure` numbers the reason, 0: none.

    `prompt` and `images` are the task's, for an episode that sampled nothing. `turns` are the parts
    of the reward that were earned by turns, by the ids of their completions.
    """

    group: int
    engine: int
    prompt: list[int]
    sequences: Sequence[TokenSequence]
    reward: float
    failure: int
    turns: Mapping[str, float] = MappingProxyType({})
    images: Images = ()


def batch_of(
    episodes: Sequence[EpisodeResult],
    version: int,
    end_token: int,
    images: RequestImages | None = None,
) -> RolloutBatch:
    """Return the sequences of episodes as a batch.

    The prompt of a row is what stands before its first sampled token. An episode without a token
    gets an end token that is not trained, so that its reward counts in its group. `version` is that
    of such rows. `images` is None if the model takes none.

    Raises:
        RuntimeError: a row does not have the tokens or log-probs that were sampled.
    """
    rows = [
        (index, episode, sequence)
        for index, episode in enumerate(episodes)
        for sequence in episode.sequences or [_nothing(episode, end_token, version)]
    ]
    index = torch.tensor([k for k, _, _ in rows])
    of_turns = [
        rewards
        for episode in episodes
        for rewards in placed(episode.sequences, episode.turns) or [[0.0]]
    ]
    turn_rewards = [on_tokens(row, own) for (_, _, row), own in zip(rows, of_turns, strict=True)]
    is_last = torch.cat([index.diff(), torch.ones(1)]) > 0
    parts = [(sequence, sequence.turns[0].start) for _, _, sequence in rows]

    def ragged(name: str, dtype: torch.dtype) -> Ragged:
        return Ragged.from_rows([vars(one)[name][start:] for one, start in parts], dtype)

    batch = RolloutBatch(
        prompts=Ragged.from_rows([sequence.ids[:start] for sequence, start in parts], torch.int32),
        responses=ragged("ids", torch.int32),
        response_mask=ragged("trained", torch.bool),
        rollout_log_probs=ragged("log_probs", torch.float32),
        group_id=torch.tensor([episode.group for _, episode, _ in rows]),
        weight_version=torch.tensor([one.versions[-1] for one, _ in parts]),
        token_versions=ragged("versions", torch.int32),
        truncated=torch.tensor([sequence.truncated for _, _, sequence in rows]),
        episode=index,
        images=images.of_rows([one.images for one, _ in parts]) if images else None,
        conversation=ConversationOutcome(
            turns=torch.tensor([len(sequence.turns) for _, _, sequence in rows]),
            environment_rewards=torch.tensor([e.reward for _, e, _ in rows], dtype=torch.float64),
            environment_failures=torch.tensor([e.failure for _, e, _ in rows]).where(is_last, 0),
        ),
        added={
            "engine": torch.tensor([episode.engine for _, episode, _ in rows]),
            "turn_rewards": Ragged.from_rows(turn_rewards, torch.float32),
        },
    )
    check_turns(batch, [sequence for _, _, sequence in rows])
    return batch


def check_turns(batch: RolloutBatch, sequences: Sequence[TokenSequence]) -> None:
    """Check each turn's fingerprint, and that no other token is trained.

    Raises:
        RuntimeError: a turn has other tokens or log-probs than were sampled, or a token that was
            not sampled is trained.
    """
    fields = zip(
        sequences,
        batch.responses.views(),
        batch.rollout_log_probs.views(),
        batch.response_mask.views(),
        strict=True,
    )
    for row, (sequence, tokens, log_probs, mask) in enumerate(fields):
        before, sampled = sequence.turns[0].start, 0
        for turn in sequence.turns:
            part = slice(turn.start - before, turn.end - before)
            if turn.digest != digest_of(tokens[part], log_probs[part]):
                raise RuntimeError(f"row {row} of the batch does not have the sampled tokens")
            sampled += int(mask[part].sum())
        if sampled != int(mask.sum()):
            raise RuntimeError(f"row {row} of the batch trains tokens that were not sampled")


def _nothing(episode: EpisodeResult, end_token: int, version: int) -> TokenSequence:
    record = EpisodeRecord(lambda text, last, images: episode.prompt)
    start = record.start("", episode.images)
    record.add(start, [end_token], [0.0], [version], "", trained=False, truncated=False)
    return record.sequences[0]


def unknown_turns(sequences: Sequence[TokenSequence], named: Iterable[str]) -> str:
    """Return why rewards of these completions cannot be placed; "" if they can."""
    known = {turn.name for sequence in sequences for turn in sequence.turns}
    seen: dict[str, str] = {}
    for identifier in named:
        if (name := turn_name(identifier)) not in known:
            return f"turns has {identifier!r}, which is no completion of the episode"
        if (other := seen.setdefault(name, identifier)) != identifier:
            return f"turns has {other!r} and {identifier!r}, which are one completion"
    return ""


def turn_name(identifier: str) -> str:
    """Return the name of a completion from the id of an answer, as chatcmpl-<name>, msg_<name>."""
    return identifier.replace("_", "-").rpartition("-")[2]


def placed(sequences: Sequence[TokenSequence], named: Mapping[str, float]) -> list[list[float]]:
    """Return a reward of each turn of each sequence, in the order of the batch.

    From a trained turn on, they sum up to its reward-to-go without R, although the turns of several
    conversations lie one after the other there. All sum up to the sum of `named`.
    """
    of_turns = {turn_name(name): reward for name, reward in named.items()}
    turns = [(row, turn) for row in sequences for turn in row.turns]
    to_go, later = {}, 0.0
    for _, turn in sorted(turns, key=lambda one: one[1].number, reverse=True):
        later += of_turns.get(turn.name, 0.0)
        to_go[turn.number] = later
    trained = [turn.number for row, turn in turns if row.trained[turn.start]]
    rewards = {k: to_go[k] - to_go[after] for k, after in pairwise(trained)}
    rewards |= {k: to_go[k] for k in trained[-1:]}
    # Earned before the first trained turn, if anything: on a turn that no estimator reads.
    others = [turn.number for _, turn in turns if turn.number not in rewards]
    rewards |= {k: later - sum(rewards.values()) for k in others[:1]}
    return [[rewards.get(turn.number, 0.0) for turn in row.turns] for row in sequences]


def on_tokens(sequence: TokenSequence, rewards: Iterable[float]) -> list[float]:
    """Return a value per token after the first prompt: rewards on the last tokens of turns."""
    before = sequence.turns[0].start
    values = [0.0] * (len(sequence.ids) - before)
    for turn, reward in zip(sequence.turns, rewards, strict=True):
        values[turn.end - 1 - before] = reward
    return values
