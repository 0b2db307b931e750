"""Ragged: rows survive joining, selecting, padding and sending; wrong lengths are refused."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.ragged import PaddedBlocks, Ragged, concat

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def ragged() -> Ragged:
    return Ragged.from_rows(ROWS, torch.int64)


def test_true_elements_of_rows_are_counted():
    flags = ragged().like(ragged().values > 2)
    assert flags.counts().tolist() == [1, 0, 1, 2]


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), data=st.data())
def test_select_pad_and_back_against_lists(lengths, data):
    rows = [[10 * b + t for t in range(length)] for b, length in enumerate(lengths)]
    field = Ragged.from_rows(rows, torch.float32)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    assert [row.tolist() for row in field.select(indices).rows()] == [rows[i] for i in indices]
    width = max(lengths)
    assert field.pad(-1).tolist() == [row + [-1] * (width - len(row)) for row in rows]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    groups=st.none() | st.lists(st.integers(0, 3), min_size=12, max_size=12),
    budget=st.integers(1, 60),
)
def test_blocks_hold_each_row_once_within_their_bound(lengths, groups, budget):
    field = Ragged.from_rows([[b] * n for b, n in enumerate(lengths)], torch.float32)
    group_id = None if groups is None else torch.tensor(groups[: len(lengths)])
    blocks = PaddedBlocks(field.lengths, group_id, budget)
    assert sorted(row for rows in blocks.rows for row in rows) == list(range(len(lengths)))
    padded = list(blocks.of(field, -1))
    for rows, block in zip(blocks.rows, padded, strict=True):
        names = rows if groups is None else [groups[row] for row in rows]
        assert block.shape == (len(rows), max(lengths[row] for row in rows))
        assert block.numel() <= budget or len(set(names)) == 1
        assert rows == sorted(rows)
        outside = [row for row in range(len(lengths)) if row not in rows]
        assert not {*names} & {row if groups is None else groups[row] for row in outside}
    assert torch.equal(blocks.ragged(padded).values, field.values)
    assert blocks.ragged(padded).lengths.tolist() == lengths


def test_a_batch_that_fits_into_a_block_is_one_in_its_own_order():
    field = ragged()
    blocks = PaddedBlocks(field.lengths, torch.tensor([7, 1, 7, 1]))
    (only,) = blocks.of(field, -1)
    assert blocks.rows == [[0, 1, 2, 3]] and torch.equal(only, field.pad(-1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_a_sent_field_is_mapped_not_copied(dtype):
    """Its buffers travel beside the pickle, and reading the tensors needs no warning."""
    field = Ragged.from_rows(ROWS, dtype)
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(field, protocol=5, buffer_callback=buffers.append)
    received = [memoryview(bytes(buffer.raw())) for buffer in buffers]  # read-only, as from Ray
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(sent, buffers=received)
    assert torch.equal(back.values, field.values) and back.values.dtype == dtype
    assert torch.equal(back.lengths, field.lengths)
    addresses = [np.frombuffer(view, dtype=np.uint8).ctypes.data for view in received]
    assert [back.values.data_ptr(), back.lengths.data_ptr()] == addresses


def test_a_value_of_each_row_on_its_elements():
    assert ragged().spread(torch.tensor([True, True, False, True])).tolist() == [
        *[True] * 3,
        False,
        True,
        True,
    ]


def test_concat_keeps_order():
    joined = concat([ragged(), ragged().select([2])])
    assert [row.tolist() for row in joined.rows()] == [*ROWS, [4]]
    ordered = concat([ragged(), ragged().select([2])], torch.tensor([4, 0, 1]))
    assert [row.tolist() for row in ordered.rows()] == [[4], [1, 2, 3], []]


def test_lengths_that_do_not_sum_are_refused():
    with pytest.raises(ValueError, match="sum\\(lengths\\)=4"):
        Ragged(torch.zeros(3), torch.tensor([4]))
