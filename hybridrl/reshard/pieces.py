"""Copies cut into rectangles of rows and columns, described by numbers: what kernels work on."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a region lies in a contiguous tensor that is part of a buffer.

    Attributes:
        buffer: number of the buffer.
        start: element of the buffer at which the tensor begins.
        shape: the tensor's.
        offset: of the region in the tensor.
    """

    buffer: int
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


class Piece(NamedTuple):
    """A rectangle that is read from one buffer and written to another, in elements.

    Attributes:
        source, source_start, source_stride: buffer, first element, distance from row to row.
        target, target_start, target_stride: the same; meaningless where nothing is written.
        rows, columns: its size.
        row, column: where it begins in the whole checkpoint tensor, seen as rows of its last dim.
        salt: of the checkpoint tensor's name.
        sum: number of the sum to which its salted fingerprint is added.
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

    @property
    def numel(self) -> int:
        """Elements copied."""
        return self.rows * self.columns


def cut(
    shape: tuple[int, ...],
    source: Place,
    target: Place,
    whole: tuple[tuple[int, ...], tuple[int, ...]],
    salt: int,
    sum: int,
) -> Iterator[Piece]:
    """The rectangles of a region: one, unless it has more than two dims.

    Args:
        shape: of the region.
        source, target: where it is read and written.
        whole: shape of the checkpoint tensor, and the region's offset in it.
        salt, sum: see `Piece`.
    """
    if not math.prod(shape):
        return
    leading = shape[:-2]
    rows, columns = (1, *shape)[-2:]
    for index in itertools.product(*(range(size) for size in leading)):
        source_start, source_stride = _begin(source.shape, source.offset, index)
        target_start, target_stride = _begin(target.shape, target.offset, index)
        first, width = _begin(*whole, index)
        yield Piece(
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
    """Element at which a rectangle begins in a contiguous tensor, and the length of a row there."""
    at = list(offset)
    for dim, i in enumerate(index):
        at[dim] += i
    element = 0
    for size, i in zip(shape, at, strict=True):
        element = element * size + i
    return element, shape[-1]
