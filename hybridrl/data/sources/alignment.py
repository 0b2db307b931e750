"""Responses in the tokens of a teacher with another tokenizer, aligned with the student's by bytes.

    student   |un|believ|able|!|
    teacher   |unbe|liev|ab|le!|
    spans     |    0    |   1  |     whose ends are ends of tokens of both, the smallest ones

The teacher reads the text of the response. Each byte of the student's that is no valid UTF-8 is
U+FFFD there, and has its borders. The teacher's tokens may have another text, as its tokenizer
normalises Unicode. Then the bytes from the first difference to the last are in one span.

Spans end at the first token without a text: if it ends responses, it is the teacher's end token.
Other special tokens and what follows them are in no span, nor is a text without any token of the
teacher.

Universal logit distillation compares next tokens over both vocabularies, paired by rank or by a
projection. It needs all logits of the teacher. Here only the log-probs of the sampled text count,
whose sums over spans are exact (algorithms/distillation.py).

Source: Boizard et al. 2024 (ULD), https://arxiv.org/abs/2402.12030; TRL's GOLD and NeMo-RL, which
    apply it to spans as these
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = NDArray[np.int64]

# A byte that is no valid UTF-8, as Python's "surrogateescape" decodes it.
_BROKEN = re.compile("[\udc80-\udcff]")


class Aligned(NamedTuple):
    """A response in the teacher's tokens, and its spans, [K], from the first token on.

    Attributes:
        teacher_ids: the teacher's tokens, all of them in spans.
        student_counts: tokens of the response in each span, > 0; later ones are in none.
        teacher_counts: tokens of `teacher_ids` in each span, > 0.
    """

    teacher_ids: list[int]
    student_counts: Ints
    teacher_counts: Ints

    def within(self, most: int) -> "Aligned":
        """Return the first spans, of at most `most` tokens of the teacher."""
        ends = self.teacher_counts.cumsum()
        kept = int(np.searchsorted(ends, most, side="right"))
        ids = self.teacher_ids[: ends[kept - 1] if kept else 0]
        return Aligned(ids, self.student_counts[:kept], self.teacher_counts[:kept])


class Aligner:
    """Aligner of a student's responses with a teacher's tokens.

    Args:
        student, teacher: their tokenizers.
        end_ids: tokens that end the student's responses.
        teacher_end_id: the teacher's for the end of a turn.

    Raises:
        ConfigError: bytes of a tokenizer's tokens are not known.
    """

    def __init__(
        self,
        student: "PreTrainedTokenizerBase",
        teacher: "PreTrainedTokenizerBase",
        end_ids: Sequence[int],
        teacher_end_id: int,
    ) -> None:
        texts = token_bytes(student).items()
        self._student = {index: text for index, text in texts if index not in end_ids}
        self._teacher = token_bytes(teacher)
        self._end_ids, self.teacher_end_id = end_ids, teacher_end_id
        backend = teacher.backend_tokenizer
        self._encoder = type(backend).from_str(backend.to_str())
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._encoder.encode_special_tokens = True  # as text, where the student spelled one

    def align(self, ids: Sequence[int]) -> Aligned:
        """Align a response, of any token ids."""
        tokens = [self._student[index] for index in takewhile(self._student.__contains__, ids)]
        pieces = _BROKEN.split(b"".join(tokens).decode("utf-8", "surrogateescape"))
        text = "\ufffd".join(pieces)
        teacher_ids = self._encoder.encode(text, add_special_tokens=False).ids if text else []
        # Ends of tokens within the text's bytes; U+FFFD has two more than the byte it stands for.
        broken = _ends(piece.encode() for piece in pieces[:-1])
        broken += np.arange(len(broken))
        ends = _ends(tokens)
        ends += 2 * np.searchsorted(broken, ends)
        of_teacher = _ends_in(text.encode(), [self._teacher.get(i, b"") for i in teacher_ids])
        borders = np.intersect1d(ends, of_teacher)
        counts = (np.searchsorted(each, borders, side="right") for each in (ends, of_teacher))
        own, others = (np.diff(count, prepend=0) for count in counts)
        if own.sum() == len(tokens) < len(ids) and ids[len(tokens)] in self._end_ids:
            teacher_ids.append(self.teacher_end_id)
            own, others = np.append(own, 1), np.append(others, 1)
        return Aligned(teacher_ids, own, others)


def token_bytes(tokenizer: "PreTrainedTokenizerBase") -> dict[int, bytes]:
    """Return the bytes of each token that has a text; special tokens have none.

    Raises:
        ConfigError: the tokenizer has neither byte-level tokens nor those of SentencePiece.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    decoder = str(tokenizer.backend_tokenizer.decoder) if tokenizer.is_fast else "none"
    if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
        raise ConfigError(
            f"the tokenizer in {tokenizer.name_or_path} decodes its tokens by {decoder[:60]}, "
            f"expected ByteLevel or ByteFallback.\nResponses are given to a teacher with another "
            f"tokenizer by the bytes of their tokens. Use a teacher with the model's tokenizer."
        )
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}

    def text(token: str) -> bytes:
        if "ByteLevel" in decoder and of_character.keys() >= set(token):
            return bytes(of_character[character] for character in token)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    added = tokenizer.added_tokens_decoder
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    texts = {index: text(token) for token, index in vocabulary.items() if index not in added}
    texts |= {index: token.content.encode() for index, token in added.items() if not token.special}
    return {index: content for index, content in texts.items() if content}


def _ends(tokens: Iterable[bytes]) -> Ints:
    """Return the end of each token in the bytes of all."""
    return np.cumsum([len(token) for token in tokens], dtype=np.int64)


def _ends_in(text: bytes, tokens: list[bytes]) -> NDArray[np.float64]:
    """Return the end of each token in `text`; those between two differences get one half place."""
    read, ends = b"".join(tokens), _ends(tokens)
    same = min(len(text), len(read))
    before = _equal_bytes(text[:same], read[:same])
    after = min(_equal_bytes(text[::-1][:same], read[::-1][:same]), same - before)
    resumed = len(text) - after
    between = np.where(ends <= before, ends, min(before + 0.5, resumed))
    return np.where(ends >= len(read) - after, ends - len(read) + len(text), between)


def _equal_bytes(one: bytes, other: bytes) -> int:
    """Return the number of equal bytes at the beginning of two of one length."""
    differs = np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)
    return int(differs.argmax()) if differs.any() else len(one)
