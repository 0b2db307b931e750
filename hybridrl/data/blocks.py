"""A ragged batch as padded blocks of bounded size, for functions of [B, T].

Whole rows stand in a block, rows of similar length together, so that little of it is padding.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from hybridrl.data.ragged import Ragged, joined, padded

# Elements of a block: 4 MiB in float32. A batch that fits into one is one block.
BLOCK_ELEMENTS = 2**20


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
