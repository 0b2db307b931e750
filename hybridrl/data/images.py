"""Images of prompts, as the model's processor made them: read and processed once per prompt.

vLLM and the trainer get these very tensors, and token ids in which each image's placeholders are
expanded already. All responses to a prompt share one `PromptImages`. A batch refers to it, and a
piece that travels to a rank has it once: pickle keeps identity.
"""

from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Prompts whose images both ends of a connection hold.
HELD = 16


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


class HeldImages:
    """Images that an end of a connection holds, so that those of a group's requests travel once.

    Both ends hold those of the last HELD prompts. They see the same messages, and hold the same.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, ...], PromptImages] = {}

    def packed(self, images: PromptImages) -> tuple[tuple[str, ...], dict[str, object]]:
        """Return keys and tensors for JSON, without tensors if the other end holds them."""
        arrays = {} if images.keys in self._held else dict(images.tensors)
        packed: dict[str, object] = {
            name: (str(x.numpy().dtype), tuple(x.shape), x.numpy().tobytes())
            for name, x in arrays.items()
        }
        self._hold(images)
        return images.keys, packed

    def unpacked(
        self, keys: Sequence[str], arrays: Mapping[str, tuple[str, Sequence[int], str]]
    ) -> PromptImages:
        """Return the images of a message."""
        tensors = {
            name: torch.from_numpy(
                np.frombuffer(bytearray(urlsafe_b64decode(data)), kind).reshape(shape)
            )
            for name, (kind, shape, data) in arrays.items()
        }
        return self._hold(PromptImages(tuple(keys), tensors) if arrays else self._held[tuple(keys)])

    def _hold(self, images: PromptImages) -> PromptImages:
        self._held.pop(images.keys, None)
        self._held[images.keys] = images  # the newest comes last
        for keys in [*self._held][:-HELD]:
            del self._held[keys]
        return images


@dataclass(frozen=True)
class ImageRows:
    """Images of each response of a batch; None for a row without."""

    rows: tuple[PromptImages | None, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int] | Tensor) -> "ImageRows":
        """Return the rows `indices`, in that order; images stay shared."""
        return ImageRows(tuple(self.rows[index] for index in torch.as_tensor(indices).tolist()))

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
