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

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> "Ragged":
        """The first lengths[b] elements of each row of a [B, T] tensor."""
        places = _places(lengths, padded.shape[1])
        return cls(padded.flatten().index_select(0, places), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(self.values.split(self.lengths.tolist()))

    def sums(self) -> Tensor:
        """[B] int64: the sum of each row, of bools or integers; 0 of an empty one."""
        assert not self.values.is_floating_point(), "differences of long sums lose digits"
        ends = self.lengths.cumsum(0)
        total = torch.cat([torch.zeros(1, dtype=torch.int64), self.values.cumsum(0)])
        return total[ends] - total[ends - self.lengths]

    def row_ids(self) -> Tensor:
        """[N] int64: which row each element belongs to."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths.numpy()))

    def select(self, indices: Sequence[int] | Tensor) -> "Ragged":
        """The rows `indices`, in that order."""
        return RowPicker.of(self.lengths, indices).pick(self)

    def pad(self, fill: float) -> Tensor:
        """The rows as [B, T], right-padded with `fill`; T is the longest row's length."""
        width = int(self.lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self) * width,), fill)
        padded.index_copy_(0, _places(self.lengths, width), self.values)
        return padded.view(len(self), width)

    def like(self, values: Tensor) -> "Ragged":
        """Other values on the same rows."""
        return Ragged(values, self.lengths)


@dataclass(frozen=True)
class RowPicker:
    """Some rows, in an order, of every ragged field whose rows have given lengths.

    Attributes:
        rows: [K] int64, which rows.
        lengths: [K] int64, theirs.
        places: [M] int64, where their elements stand in a field's flat values.
    """

    rows: Tensor
    lengths: Tensor
    places: Tensor

    @classmethod
    def of(cls, lengths: Tensor, indices: Sequence[int] | Tensor) -> "RowPicker":
        """A picker of the rows `indices` from fields with rows of `lengths`."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        picked = lengths[rows]
        return cls(rows, picked, _ranges(lengths.cumsum(0)[rows] - picked, picked))

    def pick(self, field: Ragged) -> Ragged:
        """The rows of a field."""
        return Ragged(field.values.index_select(0, self.places), self.lengths)


def concat(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all parts, in order."""
    return Ragged(
        torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts])
    )


def _places(lengths: Tensor, width: int) -> Tensor:
    """[N]: where the elements of rows of these lengths stand in a flattened [B, width] tensor."""
    return _ranges(torch.arange(len(lengths)) * width, lengths)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """[sum(lengths)]: starts[k], starts[k] + 1, ... (lengths[k] of them), for each k in turn."""
    shifts = starts - (lengths.cumsum(0) - lengths)
    # numpy repeats three times faster than torch's repeat_interleave.
    ranges = torch.from_numpy(np.repeat(shifts.numpy(), lengths.numpy()))
    return ranges.add_(torch.arange(len(ranges)))


def _from_arrays(values: np.ndarray, lengths: np.ndarray) -> Ragged:
    """What was sent, without a copy."""
    with warnings.catch_warnings():
        # Mapped memory cannot be written to, which is as it should be.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return Ragged(torch.from_numpy(values), torch.from_numpy(lengths))
