"""Rows of different lengths in one flat tensor: how a batch is stored and sent, without padding."""

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

    It is sent to other processes as arrays, which they map instead of copying them: never write
    into the tensors of a batch.

    Attributes:
        values: [N], the rows one behind the other.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_arrays, (self.values.numpy(), self.lengths.numpy())

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        """Rows as given, joined."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(self.values.split(self.lengths.tolist()))

    def counts(self) -> Tensor:
        """[B] int64: how many elements of each row are true, or not 0."""
        return torch.tensor([int(np.count_nonzero(row)) for row in self.views()])

    def row_ids(self) -> Tensor:
        """[N] int64: which row each element belongs to."""
        return self.spread(torch.arange(len(self)))

    def spread(self, of_rows: Tensor) -> Tensor:
        """[N]: a value of each row [B] on all its elements."""
        # numpy repeats three times faster than torch's repeat_interleave.
        return torch.from_numpy(np.repeat(of_rows.numpy(), self.lengths.numpy()))

    def select(self, indices: Sequence[int] | Tensor) -> "Ragged":
        """The rows `indices`, in that order, copied once."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        return Ragged(joined(self.views(rows), self.values), lengths)

    def pad(self, fill: float) -> Tensor:
        """The rows as [B, T], right-padded with `fill`; T is the longest row's length."""
        return padded(self.views(), fill)

    def like(self, values: Tensor) -> "Ragged":
        """Other values on the same rows."""
        return Ragged(values, self.lengths)

    def views(self, rows: Tensor | None = None) -> list[np.ndarray]:
        """The rows `rows`, or all; as arrays, which are cut ten times faster than tensors."""
        ends, lengths = self.lengths.cumsum(0), self.lengths
        if rows is not None:
            ends, lengths = ends[rows], lengths[rows]
        starts, flat = ends - lengths, self.values.numpy()
        return [flat[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def padded(rows: Sequence[np.ndarray], fill: float) -> Tensor:
    """Rows as [B, T], right-padded with `fill`."""
    width = max(map(len, rows), default=0)
    whole = np.full((len(rows), width), fill, rows[0].dtype if rows else np.float32)
    for to, row in zip(whole, rows, strict=True):
        to[: len(row)] = row
    return torch.from_numpy(whole)


def concat(parts: Sequence[Ragged], order: Tensor | None = None) -> Ragged:
    """The rows of all parts, copied once.

    Args:
        parts: at least one.
        order: [B] int64, which rows, counted through all parts; None: as they stand.
    """
    lengths = torch.cat([part.lengths for part in parts])
    if order is None:
        return Ragged(torch.cat([part.values for part in parts]), lengths)
    views = [view for part in parts for view in part.views()]
    chosen = [views[index] for index in order.tolist()]
    return Ragged(joined(chosen, parts[0].values), lengths[order])


def joined(rows: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """Rows one behind the other; with none of them, an empty vector of the dtype of `like`."""
    return torch.from_numpy(np.concatenate(rows)) if rows else like[:0]


def _from_arrays(values: np.ndarray, lengths: np.ndarray) -> Ragged:
    """What was sent, without a copy."""
    with warnings.catch_warnings():
        # Mapped memory cannot be written to, which is as it should be.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))
