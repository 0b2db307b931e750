"""Fingerprints of regions of tensors: equal on both sides of a reshard, or something went wrong.

fingerprint(region) = salt(source) * sum over its elements of bits * hash_0(i_0) * hash_1(i_1) ...

modulo 2^64, where bits is the element's bit pattern and (i_0, i_1, ...) its index in the WHOLE
source tensor. Hashes and salts are odd, so no element's change is lost, and they differ between
indices and tensors, so that swaps, shifts and mix-ups show. Because it is a sum, the
fingerprint of a region is the sum of those of any pieces it is cut into; and because the hash
is a product over dims, it needs a table per dim instead of a hash per element.
"""

import hashlib
import math

import torch
from torch import Tensor

from hybridrl.distributed.regions import Region

# Elements that are widened to int64 at a time: on a CPU they fit its cache, on a GPU they fill it.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Fingerprinter:
    """Computes fingerprints on one device.

    Args:
        sizes: largest size of dim 0, 1, ... of the tensors to come.
        device: of the tensors.
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self._tables = [_odd_hashes(dim, size).to(device) for dim, size in enumerate(sizes)]

    def __call__(self, source: str, region: Region, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The fingerprint of a region, as a 0-dim int64 tensor on the device.

        Args:
            source: name of the tensor that the region belongs to.
            region: where in that tensor the values are from.
            values: of the region's shape, with any strides.
            dtype: what the values are cast to first.
        """
        assert tuple(values.shape) == region.shape, (source, values.shape, region)
        rows, *rest = (
            table[start : start + size]
            for table, start, size in zip(self._tables, region.offset, region.shape, strict=False)
        )
        columns = rows.new_ones(())
        for table in rest:
            columns = columns[..., None] * table
        width = max(1, math.prod(region.shape[1:]))
        total = rows.new_zeros(())
        height = max(1, CHUNK_ELEMENTS[values.device.type] // width)
        for start in range(0, region.shape[0], height):
            chunk = values[start : start + height].to(dtype).contiguous()
            bits = chunk.view(_BITS[dtype.itemsize]).to(torch.int64)
            per_row = bits.mul_(columns).flatten(1).sum(1) if rest else bits
            total += (per_row * rows[start : start + height]).sum()
        return total * _salt(source)


def _odd_hashes(dim: int, size: int) -> Tensor:
    """[size] odd int64: SplitMix64 of (dim, index), https://doi.org/10.1145/2714064.2660195."""
    x = torch.arange(size, dtype=torch.int64) + dim * (1 << 40)
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


def _salt(source: str) -> int:
    """An odd number for a tensor's name."""
    digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "big") | 1)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return x - (1 << 64) if x >> 63 else x
