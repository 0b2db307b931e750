"""Fingerprints: against big integers, additive over pieces, and what they must notice."""

import hashlib
import itertools

import pytest
import torch

from hybridrl.reshard import copies
from hybridrl.reshard.copies import column_hashes, hashes, salt

SHAPE = (7, 5)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def values(dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def of(tensor, row=0, column=0, source="w"):
    both = tensor if tensor.dim() == 2 else tensor[None]
    return int(copies.fingerprint(both, row, column, hashes(64, 64, CPU)) * salt(source))


MASK = (1 << 64) - 1


def splitmix(index):
    """SplitMix64's output function with Python's integers."""
    x = index * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def test_equals_the_definition_in_big_integers():
    big_salt = int.from_bytes(hashlib.blake2b(b"w", digest_size=8).digest(), "big") | 1
    bits, columns = values().view(torch.int32), column_hashes(SHAPE[1]).tolist()
    total = sum(
        int(bits[i, j]) * splitmix(i) * columns[j]
        for i, j in itertools.product(range(SHAPE[0]), range(SHAPE[1]))
    )
    assert of(values()) & MASK == big_salt * total & MASK


def test_columns_have_odd_hashes_of_their_own():
    """Over more columns than any model has; a random odd number would repeat here."""
    found = column_hashes(1 << 20)
    assert (found % 2 != 0).all()
    assert len(found.unique()) == 1 << 20
    assert found.double().mean().abs() < 2**31 / 100, "both signs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "column"), [(0, 3), (3, 2), (6, 5)])
def test_pieces_add_up_to_the_whole(dtype, row, column):
    whole = values(dtype)
    total = 0
    for rows, columns in itertools.product(
        ((0, row), (row, SHAPE[0])), ((0, column), (column, SHAPE[1]))
    ):
        total += of(whole[slice(*rows), slice(*columns)], rows[0], columns[0])
    assert (total - of(whole)) & MASK == 0


def test_chunks_do_not_matter(monkeypatch):
    expected = of(values())
    monkeypatch.setattr(copies, "CHUNK_ELEMENTS", 11)
    assert of(values()) == expected


def test_strides_do_not_matter():
    assert of(values().t().contiguous().t()) == of(values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_swap_of_two_elements_shows(dtype):
    whole, expected = values(dtype), of(values(dtype))
    flat = whole.view(-1)
    for a, b in itertools.combinations(range(flat.numel()), 2):
        swapped = flat.clone()
        swapped[a], swapped[b] = flat[b], flat[a]
        assert of(swapped.view(SHAPE)) != expected or flat[a] == flat[b], (a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_shows(dtype):
    expected = of(values(dtype))
    for byte, bit in itertools.product(range(values(dtype).nbytes), range(8)):
        flipped = values(dtype)
        flipped.view(torch.uint8).view(-1)[byte] ^= 1 << bit
        assert of(flipped) != expected, (byte, bit)


def test_swapped_rows_and_columns_show():
    assert of(values()[[1, 0, 2, 3, 4, 5, 6]]) != of(values())
    assert of(values()[:, [1, 0, 2, 3, 4]]) != of(values())


def test_a_shifted_shard_shows():
    """The same values, taken for the rows one further down."""
    part = values()[:3]
    assert of(part, row=2) != of(part, row=3)
    assert of(values().roll(1, dims=0)) != of(values())
    assert of(values().roll(1, dims=1)) != of(values())


def test_the_same_values_of_another_tensor_show():
    assert of(values(), source="q") != of(values(), source="k")


def test_vectors_have_fingerprints_too():
    vector = values()[:, 0]
    assert of(vector) != of(vector.flip(0))
    pieces = of(vector[:2]) + of(vector[2:], column=2)
    assert (pieces - of(vector)) & MASK == 0
