"""Rows of different lengths in one flat tensor: the storage of a batch, without padding.

Computations take it in parts of bounded size: padded blocks [b, t] of whole rows of similar length,
or flat chunks [n].
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements of a block: 8 MiB in float32.
BLOCK_ELEMENTS = 2**21
# Elements of a flat chunk: several fit into a core's cache.
CHUNK_ELEMENTS = 2**16


@dataclass(frozen=True)
class Ragged:
    """B rows of different lengths.

    Other processes map the tensors as shared memory: never write into the tensors of a batch.

    Attributes:
        values: [N], the concatenated rows.
        lengths: [B] int64, with sum N.
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        total = int(self.lengths.sum())
        if self.values.dim() != 1 or total != len(self.values):
            raise ValueError(
                f"Ragged needs flat values of sum(lengths)={total} elements; got shape "
                f"{tuple(self.values.shape)}"
            )

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_arrays, (self.values.numpy(), self.lengths.numpy())

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        """Concatenate rows."""
        # Of a list, numpy reads 2.5 times as many elements a second as torch.
        of_lists = torch.empty(0, dtype=dtype).numpy().dtype
        tensors = [
            row.to(dtype) if isinstance(row, Tensor) else torch.from_numpy(np.array(row, of_lists))
            for row in rows
        ]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """Return views of the rows."""
        return list(self.values.split(self.lengths.tolist()))

    def counts(self) -> Tensor:
        """Return [B] int64, the nonzero elements of each row."""
        return torch.tensor([int(np.count_nonzero(row)) for row in self.views()])

    def row_ids(self) -> Tensor:
        """Return [N] int64, the row index of each element."""
        return self.spread(torch.arange(len(self)))

    def spread(self, of_rows: Tensor) -> Tensor:
        """Return [N], a value of each row [B] repeated over its elements."""
        # np.repeat is three times as fast as torch's repeat_interleave.
        return torch.from_numpy(np.repeat(of_rows.numpy(), self.lengths.numpy()))

    def select(self, indices: Sequence[int] | Tensor) -> "Ragged":
        """Return the rows `indices`, in that order, copied once."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        return Ragged(joined(self.views(rows), self.values), lengths)

    def pad(self, fill: float) -> Tensor:
        """Return the rows as [B, T], right-padded with `fill`; T is the longest row's length."""
        return padded(self.views(), fill)

    def like(self, values: Tensor) -> "Ragged":
        """Return other values [N] with the same row lengths."""
        return Ragged(values, self.lengths)

    def views(self, rows: Tensor | None = None) -> list[np.ndarray]:
        """Return views of `rows`, or of all rows, as arrays, which are faster to slice."""
        ends, lengths = self.lengths.cumsum(0), self.lengths
        if rows is not None:
            ends, lengths = ends[rows], lengths[rows]
        starts, flat = ends - lengths, self.values.numpy()
        return [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def padded(rows: Sequence[np.ndarray], fill: float) -> Tensor:
    """Return rows as [B, T], right-padded with `fill`."""
    width = max(map(len, rows), default=0)
    whole = np.full((len(rows), width), fill, rows[0].dtype if rows else np.float32)
    for to, row in zip(whole, rows, strict=True):
        to[: len(row)] = row
    return torch.from_numpy(whole)


def concat(parts: Sequence[Ragged], order: Tensor | None = None) -> Ragged:
    """Concatenate at least one part; `order` [B] int64, if given, are the indices of its rows."""
    lengths = torch.cat([part.lengths for part in parts])
    if order is None:
        return Ragged(torch.cat([part.values for part in parts]), lengths)
    views = [view for part in parts for view in part.views()]
    chosen = [views[index] for index in order.tolist()]
    return Ragged(joined(chosen, parts[0].values), lengths[order])


def joined(rows: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Concatenate rows; without rows, return an empty vector of the dtype of `like`."""
    return torch.from_numpy(np.concatenate(rows)) if rows else like[:0]


def _from_arrays(values: np.ndarray, lengths: np.ndarray) -> Ragged:
    """Rebuild a Ragged without a copy."""
    with warnings.catch_warnings():
        # Shared memory is read-only on purpose.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))


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
        self, lengths: Tensor, group_id: Tensor | None = None, max_elements: int = BLOCK_ELEMENTS
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
