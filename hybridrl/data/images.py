"""Images of prompts, as the model's processor made them: read and processed once per prompt.

vLLM and the trainer get these very tensors, and token ids in which each image's placeholders are
expanded already. All responses to a prompt share one `PromptImages`. A batch refers to it, and a
piece that travels to a rank has it once: pickle keeps identity.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of one prompt, in the order of their placeholders.

    Attributes:
        keys: of each image, a hash of its file and of the processor's settings.
        tensors: what the processor returns, by its names, such as pixel_values [P, D] float32 (P
            patches of all images) and image_grid_thw [n, 3] int64; images in order in dim 0.
    """

    keys: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_arrays, (self.keys, {name: x.numpy() for name, x in self.tensors.items()})

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def sizes(self) -> list[list[int]]:
        """Of each image its grid of patches in time, height and width, or its sides in pixels."""
        named = ("image_grid_thw", "image_sizes")
        return next(self.tensors[name] for name in named if name in self.tensors).tolist()


def _from_arrays(keys: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> PromptImages:
    # Other processes map the arrays as shared memory, read-only: never write into them.
    return PromptImages(keys, {name: torch.from_numpy(x) for name, x in arrays.items()})


@dataclass(frozen=True)
class ImageRows:
    """Images of each response of a batch; None for a row without."""

    rows: tuple[PromptImages | None, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int] | Tensor) -> "ImageRows":
        """Return the rows `indices`, in that order; images stay shared."""
        return ImageRows(tuple(self.rows[int(index)] for index in indices))

    @classmethod
    def none(cls, count: int) -> "ImageRows":
        """Return rows without images."""
        return cls((None,) * count)

    @classmethod
    def concat(cls, parts: Iterable["ImageRows"]) -> "ImageRows":
        """Concatenate parts."""
        return cls(tuple(row for part in parts for row in part.rows))


def image_rows(images: Iterable[PromptImages | None]) -> ImageRows | None:
    """Return the images of rows; None if no row has any."""
    rows = tuple(images)
    return ImageRows(rows) if any(row is not None for row in rows) else None
