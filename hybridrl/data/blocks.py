"""Ragged batches in parts of bounded size: padded blocks [b, t], or flat chunks [n].

A block holds whole rows of similar length, to keep padding small.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hybridrl.data.ragged import Ragged, joined, padded

# Elements of a block: 8 MiB in float32.
BLOCK_ELEMENTS = 2**21
# Elements of a flat chunk: several fit into a core's cache.
CHUNK_ELEMENTS = 2**16


def in_chunks(function: Callable[..., Tensor], *flat: Tensor) -> Tensor:
    """Compute an element-wise `function(*flat)` [N] chunk by chunk, to keep temporaries small."""
    chunks = zip(*(tensor.split(CHUNK_ELEMENTS) for tensor in flat), strict=True)
    return torch.cat([function(*parts) for parts in chunks])


def row_chunks(lengths: Tensor, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield consecutive rows of about CHUNK_ELEMENTS in total: lengths [b] and fields [n].

    `lengths` [B] are those of the rows of the fields `flat` [N].
    """
    chunk = lengths.cumsum(0) // CHUNK_ELEMENTS
    of_chunks = lengths.split(chunk.unique_consecutive(return_counts=True)[1].tolist())
    sizes = [int(part.sum()) for part in of_chunks]
    return zip(of_chunks, *(field.split(sizes) for field in flat), strict=True)


class PaddedBlocks:
    """Partition of a batch's rows into padded blocks; the rows of a group share a block.

    Args:
        lengths: [B] int64, of the rows.
        group_id: [B] int64, shared by the rows of a group; None: each row is a group.
        max_elements: of a padded block; a larger group is a block of its own.

    Attributes:
        rows: ascending row indices of each block.
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
        """Yield a field's blocks [b, t], right-padded with `fill`."""
        rows = field.views()
        return (padded([rows[row] for row in block], fill) for block in self.rows)

    def ragged(self, blocks: Sequence[Tensor]) -> Ragged:
        """Rebuild a field from its blocks; padding is ignored."""
        lengths = self._lengths.tolist()
        rows: dict[int, np.ndarray] = {}
        for numbers, block in zip(self.rows, blocks, strict=True):
            for number, row in zip(numbers, block.numpy(), strict=True):
                rows[number] = row[: lengths[number]]
        return Ragged(joined([rows[k] for k in range(len(rows))], blocks[0]), self._lengths)
