"""Ragged: rows survive joining, selecting, padding and concatenating; wrong lengths are refused."""

import pytest
import torch

from hybridrl.data.ragged import Ragged, concat, mask_of

ROWS = [[1, 2, 3], [], [4], [5, 6]]


def ragged() -> Ragged:
    return Ragged.from_rows(ROWS, torch.int64)


def test_rows_come_back_as_given():
    assert [row.tolist() for row in ragged().rows()] == ROWS


def test_select_orders_and_repeats():
    picked = ragged().select([3, 0, 3])
    assert [row.tolist() for row in picked.rows()] == [[5, 6], [1, 2, 3], [5, 6]]


def test_select_of_nothing_is_empty():
    assert len(ragged().select([])) == 0


def test_pad_fills_on_the_right():
    assert ragged().pad(-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1], [5, 6, -1]]


def test_from_padded_inverts_pad():
    back = Ragged.from_padded(ragged().pad(0), ragged().lengths)
    assert torch.equal(back.values, ragged().values)


def test_concat_keeps_order():
    joined = concat([ragged(), ragged().select([2])])
    assert [row.tolist() for row in joined.rows()] == [*ROWS, [4]]


def test_mask_is_true_on_each_rows_length():
    assert mask_of(torch.tensor([2, 0]), 3).tolist() == [[True, True, False], [False] * 3]


def test_lengths_that_do_not_sum_are_refused():
    with pytest.raises(ValueError, match="sum\\(lengths\\)=4"):
        Ragged(torch.zeros(3), torch.tensor([4]))
