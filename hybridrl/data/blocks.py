"""A ragged batch in parts of bounded size: padded blocks for functions of [B, T], or flat chunks.

Whole rows stand in a block, rows of similar length together, so that little of it is padding.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from hybridrl.data.ragged import Ragged, joined, padded

# Elements of a block: 8 MiB in float32. A batch that fits into one is one block.
BLOCK_ELEMENTS = 2**21
# Elements of a flat chunk: a few of them stay in a core's cache.
CHUNK_ELEMENTS = 2**16


def in_chunks(function: Callable[..., Tensor], *flat: Tensor) -> Tensor:
    """`function(*flat)` [N] of an element-wise function, without temporaries as long as the batch.

    Args:
        function: tensors [n] -> tensor [n].
        flat: tensors [N].
    """
    chunks = zip(*(tensor.split(CHUNK_ELEMENTS) for tensor in flat), strict=True)
    first = function(*next(chunks))
    if len(first) == len(flat[0]):
        return first
    whole = first.new_empty(len(flat[0]))
    whole[: len(first)] = first
    for to, parts in zip(whole.split(CHUNK_ELEMENTS)[1:], chunks, strict=True):
        to[:] = function(*parts)
    return whole


def row_chunks(lengths: Tensor, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive rows, about CHUNK_ELEMENTS in all: their lengths [b] and their fields [n].

    Args:
        lengths: [B] int64, of the rows, with sum N.
        flat: fields [N].
    """
    chunk = lengths.cumsum(0) // CHUNK_ELEMENTS
    of_chunks = lengths.split(chunk.unique_consecutive(return_counts=True)[1].tolist())
    sizes = [int(part.sum()) for part in of_chunks]
    return zip(of_chunks, *(field.split(sizes) for field in flat), strict=True)


class PaddedBlocks:
    """How the rows of a batch are put into blocks; a group's rows stay together.

    Args:
        lengths: [B] int64, of the rows.
        group_id: [B] int64, rows of a group share it; None: each row is a group.
        max_elements: of a padded block. A group that is larger by itself is a block of its own.

    Attributes:
        rows: of each block, rising.
    """

    def __init__(
        self,
        lengths: Tensor,
        group_id: Tensor | None = None,
        max_elements: int = BLOCK_ELEMENTS,
    ) -> None:
        self._lengths = lengths
        of_row = lengths.tolist()
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(range(len(of_row)) if group_id is None else group_id.tolist()):
            groups.setdefault(group, []).append(row)
        longest = {group: max(of_row[row] for row in rows) for group, rows in groups.items()}
        blocks: list[list[int]] = []
        width = 0
        for group in sorted(groups, key=lambda group: -longest[group]):
            if not blocks or (len(blocks[-1]) + len(groups[group])) * width > max_elements:
                blocks.append([])
                width = longest[group]
            blocks[-1] += groups[group]
        self.rows = [sorted(block) for block in blocks]

    def of(self, field: Ragged, fill: float) -> Iterator[Tensor]:
        """A field's blocks [b, t], right-padded with `fill`."""
        rows = field.views()
        return (padded([rows[row] for row in block], fill) for block in self.rows)

    def ragged(self, blocks: Sequence[Tensor]) -> Ragged:
        """The field that has these blocks, whatever stands in their padding."""
        lengths = self._lengths.tolist()
        rows: dict[int, np.ndarray] = {}
        for numbers, block in zip(self.rows, blocks, strict=True):
            for number, row in zip(numbers, block.numpy(), strict=True):
                rows[number] = row[: lengths[number]]
        return Ragged(joined([rows[k] for k in range(len(rows))], blocks[0]), self._lengths)
