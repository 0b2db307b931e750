"""Fingerprints of regions of tensors, which must be equal on both sides of a reshard.

fingerprint(region) = salt(source) * sum over its elements of bits * row_hash(r) * column_hash(c)

modulo 2^64, where bits is the element's bit pattern, c its index in the last dim of the WHOLE
source tensor and r its index in all dims before, row-major (0 in a vector). Hashes and salts are
odd, so every change of one element is detected. They differ between indices and tensors, so swaps,
shifts and mix-ups are detected, too. The fingerprint of a region is the sum of those of its parts.
Bits and column hashes have at most 32 bits each: on a GPU an element costs one multiply-add, and
only a row's sum is multiplied by 64 bits.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Elements that are widened to int64 at a time: they fit a CPU's cache.
CHUNK_ELEMENTS = 1 << 17

BITS = {2: torch.int16, 4: torch.int32}


class Hashes(NamedTuple):
    """Hashes of all indices, on one device.

    Attributes:
        rows: [largest number of rows] int64, odd.
        columns: [largest number of columns] int32, odd, all different.
    """

    rows: Tensor
    columns: Tensor


def hashes(num_rows: int, num_columns: int, device: torch.device) -> Hashes:
    """Compute the hashes of row and column indices."""
    return Hashes(row_hashes(num_rows).to(device), column_hashes(num_columns).to(device))


def row_hashes(size: int) -> Tensor:
    """Return [size] odd int64: SplitMix64 of the index, https://doi.org/10.1145/2714064.2660195."""
    x = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64)) | 1


def column_hashes(size: int) -> Tensor:
    """Return [size] odd int32: 2 p(index) + 1 for a permutation p of the 31-bit numbers.

    p multiplies by odd numbers modulo 2^31 and folds high bits into low ones; both are invertible.
    """
    mask = (1 << 31) - 1
    x = torch.arange(size, dtype=torch.int64)
    for factor in (0x2C1B3C6D, 0x297A2D39, 0x165667B1):
        x = ((x ^ (x >> 16)) * factor + 0x1B873593) & mask
    x ^= x >> 15
    return (2 * x + 1).to(torch.int32)  # wraps around: the same 32 bits


def salt(source: str) -> int:
    """Return an odd int64 for a tensor's name."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) | 1


def fingerprint(values: Tensor, row: int, column: int, hashes: Hashes) -> Tensor:
    """Compute the unsalted fingerprint of a rectangle that begins at (row, column) of its tensor.

    Reference implementation, used on CPUs; on GPUs the copy kernel computes the same.

    Args:
        values: [rows, columns] of a dtype of 2 or 4 bytes, with any strides.
        row, column: start of the values in the whole tensor.
        hashes: hashes of all rows and columns.

    Returns:
        0-dim int64.
    """
    rows = hashes.rows[row : row + values.shape[0]]
    columns = hashes.columns[column : column + values.shape[1]].to(torch.int64)
    assert len(rows) == values.shape[0] and len(columns) == values.shape[1]
    total = rows.new_zeros(())
    height = max(1, CHUNK_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, len(rows), height):
        chunk = values[start : start + height].contiguous()
        bits = chunk.view(BITS[values.dtype.itemsize]).to(torch.int64)
        total += (bits.mul_(columns).sum(1) * rows[start : start + height]).sum()
    return total
