"""Tokens of an episode: what was sampled, and the token sequences that are trained.

A request is rendered to text. Where it begins with that of a recorded sequence, up to the end of a
turn, the recorded token ids are used. Only the rest is tokenised:

    recorded        <|user|>2 + 3?<|assistant|>5<|end|>
    next request    <|user|>2 + 3?<|assistant|>5<|end|><|user|>And doubled?<|assistant|>
                    these token ids are used again     this is tokenised

Otherwise (edited history, stripped thinking, a sub-agent) the request begins another sequence: a
branch. A sampled token is trained in one sequence alone, so where two requests continue the same
turn, the second has the tokens before as context.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridrl.data.batch import NO_VERSION
from hybridrl.data.sources.images import ImageFile, read_image

Images = tuple[ImageFile, ...]
# Token ids of a text, with those of its images, behind a token; None: at the beginning.
Encode = Callable[[str, int | None, Images], list[int]]
# Characters around the place where texts part, in examples.
SHOWN_CHARS = 40


class Turn(NamedTuple):
    """A sampled turn of a sequence.

    Attributes:
        start: index of its first token.
        end: index behind its last one, and `text_end` the number of characters up to there.
        digest: of its tokens and log-probs as the engine returned them.
        name: of its completion, and `number` its place among all turns of the episode.
        images: number of the sequence's images before it.
    """

    start: int
    end: int
    text_end: int
    digest: str
    name: str
    number: int
    images: int = 0


@dataclass
class TokenSequence:
    """Tokens of a conversation of an episode; those of prompts have the log-prob 0.

    `versions` are those of the weights that sampled them, `NO_VERSION` for prompts. `trained` is
    true on sampled tokens, unless their sampling parameters forbid to train them. `truncated`: the
    context was full at the end of the last turn. `messages` are those of its last request. `ids`
    have the tokens of `images`, `text` a placeholder of each.
    """

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    trained: list[bool]
    text: str
    turns: list[Turn] = field(default_factory=list)
    truncated: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    images: Images = ()

    def turns_within(self, text: str, images: Images) -> int:
        """Return the number of turns, from the first on, up to whose end a request has the same."""

        def departs(turn: Turn) -> bool:
            return not (
                text.startswith(self.text[: turn.text_end])
                and images[: turn.images] == self.images[: turn.images]
            )

        if not departs(self.turns[-1]):  # as most requests
            return len(self.turns)
        return bisect_left(self.turns, True, key=departs)


class Start(NamedTuple):
    """Beginning of a turn: its prompt with all images, and the turn that it continues."""

    prompt: list[int]
    text: str
    sequence: TokenSequence | None
    turn: int
    images: Images


@dataclass
class EpisodeRecord:
    """Token sequences of an episode, in the order of their first turns.

    Attributes:
        most: sequences that are kept, the last ones; None: all.
        count: turns that were recorded.
        branch: of the first branch, where the request departs from what was recorded; or "".
    """

    encode: Encode
    most: int | None = None
    sequences: list[TokenSequence] = field(default_factory=list)
    branch: str = ""
    count: int = 0

    def start(self, text: str, images: Images = ()) -> Start:
        """Return the prompt of a request that was rendered to `text`, with the images in it."""
        matches = [
            (sequence.turns[count - 1].text_end, sequence, count - 1)
            for sequence in self.sequences
            if (count := sequence.turns_within(text, images))
        ]
        if not matches:
            if self.sequences and not self.branch:
                self.branch = _departure(self.sequences[-1], text, images)
            return Start(self.encode(text, None, images), text, None, -1, images)
        length, sequence, index = max(matches, key=lambda match: match[0])
        rest, new = text[length:], images[sequence.turns[index].images :]
        ids = sequence.ids[: sequence.turns[index].end]
        if rest or new:
            ids += self.encode(rest, ids[-1], new)
        return Start(ids, text, sequence, index, images)

    def add(
        self,
        start: Start,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        text: str,
        *,
        name: str = "",
        messages: Sequence[Mapping[str, Any]] = (),
        trained: bool,
        truncated: bool,
    ) -> None:
        """Record a sampled turn; `text` is that of its tokens, special ones included."""
        sequence = start.sequence
        if sequence is None or start.turn + 1 < len(sequence.turns):
            context = len(start.prompt)
            sequence = TokenSequence(
                list(start.prompt),
                [0.0] * context,
                [NO_VERSION] * context,
                [False] * context,
                start.text,
            )
            self.sequences.append(sequence)
            if self.most is not None:
                del self.sequences[: -self.most]
        else:
            more = start.prompt[len(sequence.ids) :]
            sequence.ids.extend(more)
            sequence.log_probs.extend([0.0] * len(more))
            sequence.versions.extend([NO_VERSION] * len(more))
            sequence.trained.extend([False] * len(more))
        first = len(sequence.ids)
        sequence.ids.extend(tokens)
        sequence.log_probs.extend(log_probs)
        sequence.versions.extend(versions)
        sequence.trained.extend([trained] * len(tokens))
        sequence.text = start.text + text
        sequence.truncated, sequence.messages = truncated, messages
        sequence.images = start.images
        end = len(sequence.ids)
        digest = digest_of(tokens, log_probs)
        turn = Turn(first, end, len(sequence.text), digest, name, self.count, len(start.images))
        sequence.turns.append(turn)
        self.count += 1


def encode_sequences(sequences: Sequence[TokenSequence]) -> list[dict[str, Any]]:
    """Return token sequences as JSON objects, without the messages; numbers keep their bits."""
    return [
        vars(one) | {"messages": (), "images": [image.url for image in one.images]}
        for one in sequences
    ]


def decode_sequences(encoded: list[dict[str, Any]]) -> list[TokenSequence]:
    """Return the token sequences of a value of `encode_sequences`."""
    return [
        TokenSequence(
            **one
            | {
                "turns": [Turn(*turn) for turn in one["turns"]],
                "images": tuple(read_image(url, Path()) for url in one.get("images", ())),
            }
        )
        for one in encoded
    ]


def digest_of(tokens: Sequence[int] | np.ndarray, log_probs: Sequence[float] | np.ndarray) -> str:
    """Return the fingerprint of sampled tokens and their log-probs."""
    parts = np.asarray(tokens, np.int32).tobytes(), np.asarray(log_probs, np.float32).tobytes()
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _departure(sequence: TokenSequence, requested: str, images: Images) -> str:
    """Describe the first difference of a request from what is recorded."""
    recorded = sequence.text
    pairs = zip(recorded, requested, strict=False)
    at = next((k for k, (one, other) in enumerate(pairs) if one != other), len(requested))
    if at == len(requested) and images != sequence.images[: len(images)]:
        return "the request has other images than were recorded"
    before = recorded[max(0, at - SHOWN_CHARS) : at]
    one, other = (text[at : at + SHOWN_CHARS] for text in (recorded, requested))
    return f"after {before!r} the request has {other!r}, but {one!r} was recorded"
