"""Rows of different lengths in one flat tensor: how a batch is stored and sent, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """B rows of different lengths.

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

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        """Rows as given, joined."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        return cls(torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> "Ragged":
        """The first lengths[b] elements of each row of a [B, T] tensor."""
        return cls(padded[mask_of(lengths, padded.shape[1])], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """Views of the rows."""
        return list(self.values.split(self.lengths.tolist()))

    def select(self, indices: Sequence[int]) -> "Ragged":
        """The rows `indices`, in that order."""
        rows = self.rows()
        picked = [rows[i] for i in indices]
        return Ragged(
            torch.cat(picked) if picked else self.values[:0],
            self.lengths[torch.as_tensor(indices, dtype=torch.int64)],
        )

    def pad(self, fill: float) -> Tensor:
        """The rows as [B, T], right-padded with `fill`; T is the longest row's length."""
        width = int(self.lengths.max()) if len(self) else 0
        padded = self.values.new_full((len(self), width), fill)
        padded[mask_of(self.lengths, width)] = self.values
        return padded

    def like(self, values: Tensor) -> "Ragged":
        """Other values on the same rows."""
        return Ragged(values, self.lengths)


def concat(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all parts, in order."""
    return Ragged(
        torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts])
    )


def mask_of(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool, true on the first lengths[b] positions of row b."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]
