"""Ragged: rows survive joining, selecting, padding and sending; wrong lengths are refused."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.ragged import Ragged, RowPicker, concat

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def ragged() -> Ragged:
    return Ragged.from_rows(ROWS, torch.int64)


def test_rows_come_back_as_given():
    assert [row.tolist() for row in ragged().rows()] == ROWS


def test_select_orders_and_repeats():
    picked = ragged().select([3, 0, 3])
    assert [row.tolist() for row in picked.rows()] == [[5, 6], [1, 2, 3], [5, 6]]


def test_sums_of_rows():
    assert ragged().sums().tolist() == [6, 0, 4, 11]
    flags = ragged().like(ragged().values > 2)
    assert flags.sums().tolist() == [1, 0, 1, 2]


def test_select_of_nothing_is_empty():
    assert len(ragged().select([])) == 0


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), data=st.data())
def test_select_pad_and_back_against_lists(lengths, data):
    rows = [[10 * b + t for t in range(length)] for b, length in enumerate(lengths)]
    field = Ragged.from_rows(rows, torch.float32)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    assert [row.tolist() for row in field.select(indices).rows()] == [rows[i] for i in indices]
    width = max(lengths)
    assert field.pad(-1).tolist() == [row + [-1] * (width - len(row)) for row in rows]
    assert torch.equal(Ragged.from_padded(field.pad(-1), field.lengths).values, field.values)


def test_one_picker_serves_all_fields_of_the_same_rows():
    field = ragged()
    picker = RowPicker.of(field.lengths, [3, 0])
    flags = field.like(field.values > 2)
    assert picker.pick(field).values.tolist() == [5, 6, 1, 2, 3]
    assert picker.pick(flags).values.tolist() == [True, True, False, False, True]


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


def test_pad_fills_on_the_right():
    assert ragged().pad(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]


def test_from_padded_inverts_pad():
    back = Ragged.from_padded(ragged().pad(0), ragged().lengths)
    assert torch.equal(back.values, ragged().values)


def test_concat_keeps_order():
    joined = concat([ragged(), ragged().select([2])])
    assert [row.tolist() for row in joined.rows()] == [*ROWS, [4]]


def test_lengths_that_do_not_sum_are_refused():
    with pytest.raises(ValueError, match="sum\\(lengths\\)=4"):
        Ragged(torch.zeros(3), torch.tensor([4]))
