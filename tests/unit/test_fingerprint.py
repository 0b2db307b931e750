"""Fingerprints: against big integers, additive over pieces, and what they must notice."""

import hashlib
import itertools

import pytest
import torch

from hybridrl.distributed.regions import Region
from hybridrl.reshard import fingerprint
from hybridrl.reshard.fingerprint import Fingerprinter

SHAPE = (7, 5)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def values(dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def of(tensor, region=None, source="w", dtype=None):
    region = region or Region((0,) * tensor.dim(), tuple(tensor.shape))
    return int(Fingerprinter([64, 64], CPU)(source, region, tensor, dtype or tensor.dtype))


def splitmix(dim, index):
    """SplitMix64's output function with Python's integers."""
    mask = (1 << 64) - 1
    x = (index + (dim << 40)) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) | 1


def test_equals_the_definition_in_big_integers():
    salt = int.from_bytes(hashlib.blake2b(b"w", digest_size=8).digest(), "big") | 1
    bits = values().view(torch.int32)
    total = sum(
        int(bits[i, j]) * splitmix(0, i) * splitmix(1, j)
        for i, j in itertools.product(range(SHAPE[0]), range(SHAPE[1]))
    )
    assert of(values()) % (1 << 64) == salt * total % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "column"), [(0, 3), (3, 2), (6, 5)])
def test_pieces_add_up_to_the_whole(dtype, row, column):
    whole = values(dtype)
    total = 0
    for rows, columns in itertools.product(
        ((0, row), (row, SHAPE[0])), ((0, column), (column, SHAPE[1]))
    ):
        region = Region((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
        total += of(whole[slice(*rows), slice(*columns)], region)
    assert (total - of(whole)) % (1 << 64) == 0


def test_chunks_do_not_matter(monkeypatch):
    expected = of(values())
    monkeypatch.setitem(fingerprint.CHUNK_ELEMENTS, "cpu", 11)
    assert of(values()) == expected


def test_strides_do_not_matter():
    assert of(values().t().contiguous().t()) == of(values())


def test_the_cast_comes_first():
    assert of(values(), dtype=torch.bfloat16) == of(values(torch.bfloat16))
    assert of(values(), dtype=torch.bfloat16) != of(values())


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
    assert of(part, Region((2, 0), (3, 5))) != of(part, Region((3, 0), (3, 5)))
    assert of(values().roll(1, dims=0)) != of(values())
    assert of(values().roll(1, dims=1)) != of(values())


def test_the_same_values_of_another_tensor_show():
    assert of(values(), source="q") != of(values(), source="k")


def test_vectors_have_fingerprints_too():
    vector = values()[:, 0]
    assert of(vector) != of(vector.flip(0))
    pieces = of(vector[:2], Region((0,), (2,))) + of(vector[2:], Region((2,), (5,)))
    assert (pieces - of(vector)) % (1 << 64) == 0
