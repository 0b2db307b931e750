"""Regions of tensors lowered to rectangles of rows and columns, in numbers for kernels."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybridrl.reshard.buffers import BufferRegion


class CopyRect(NamedTuple):
    """Rectangle that is read from one buffer and written to another, in elements.

    Attributes:
        source, source_start, source_stride: buffer, first element, distance from row to row.
        target, target_start, target_stride: the same; meaningless where nothing is written.
        rows, columns: size.
        row, column: start in the whole checkpoint tensor, viewed as rows of its last dim.
        salt: fingerprint salt of the checkpoint tensor.
        sum: number of the sum to which the salted fingerprint is added.
    """

    source: int
    source_start: int
    source_stride: int
    target: int
    target_start: int
    target_stride: int
    rows: int
    columns: int
    row: int
    column: int
    salt: int
    sum: int


def cut(
    shape: tuple[int, ...],
    source: BufferRegion,
    target: BufferRegion,
    whole: tuple[tuple[int, ...], tuple[int, ...]],
    salt: int,
    sum: int,
) -> Iterator[CopyRect]:
    """Yield the rectangles of a region: one, unless the region has more than two dims.

    Args:
        shape: shape of the region.
        source, target: the region in the buffers that are read and written.
        whole: shape of the checkpoint tensor, and the region's offset in it.
        salt, sum: see `CopyRect`.
    """
    if not math.prod(shape):
        return
    leading = shape[:-2]
    rows, columns = (1, *shape)[-2:]
    for index in itertools.product(*(range(size) for size in leading)):
        source_start, source_stride = _begin(source.shape, source.offset, index)
        target_start, target_stride = _begin(target.shape, target.offset, index)
        first, width = _begin(*whole, index)
        yield CopyRect(
            source=source.buffer,
            source_start=source.start + source_start,
            source_stride=source_stride if rows > 1 else 0,
            target=target.buffer,
            target_start=target.start + target_start,
            target_stride=target_stride if rows > 1 else 0,
            rows=rows,
            columns=columns,
            row=first // width,
            column=first % width,
            salt=salt,
            sum=sum,
        )


def _begin(shape: Sequence[int], offset: Sequence[int], index: Sequence[int]) -> tuple[int, int]:
    """Return a rectangle's first element in a contiguous tensor, and the tensor's row length."""
    at = list(offset)
    for dim, i in enumerate(index):
        at[dim] += i
    element = 0
    for size, i in zip(shape, at, strict=True):
        element = element * size + i
    return element, shape[-1]
