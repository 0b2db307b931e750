"""Rows of different lengths in one flat tensor: the storage of a batch, without padding."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    """Concatenate parts; each row is copied once.

    Args:
        parts: at least one.
        order: [B] int64, indices into the concatenation, to reorder it; None: unchanged.
    """
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
