"""Memory-mapped weights of a checkpoint, read part by part.

A part is a view of a mapped file, in the stored dtype. The kernel reads its pages on first use and
evicts them when memory is short.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hybridrl.models.weight_files import PICKLED, weight_files

# Part of a tensor: a slice of each dim.
Part = tuple[slice, ...]

# Prefix and tied names of the supported models. Folders of a backbone have no prefix, and of two
# tied tensors a folder may have either.
PREFIX, TIED = "model.", {"model.embed_tokens.weight": "lm_head.weight"}


class MappedWeights:
    """Weights of a Hugging Face folder: *.safetensors or, without these, *.bin.

    Args:
        folder: folder of the checkpoint. Pickled files are loaded with weights_only; a file from
            before torch 1.6 cannot be mapped and is read whole.

    Attributes:
        shapes: shapes by the names in the files.
    """

    def __init__(self, folder: Path) -> None:
        self._mapped: dict[str, safe_open] = {}
        self._pickled: dict[str, Tensor] = {}
        for file in _files(folder):
            if file.suffix == ".safetensors":
                opened = safe_open(file, framework="pt")
                self._mapped |= dict.fromkeys(opened.keys(), opened)
            else:
                can_map = zipfile.is_zipfile(file)
                self._pickled |= torch.load(
                    file, map_location="cpu", weights_only=True, mmap=can_map
                )
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(opened.get_slice(name).get_shape()) for name, opened in self._mapped.items()
        } | {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}

    def part(self, name: str, where: Part) -> Tensor:
        """Return a part of a tensor by its name in the files: a view of the file, on CPU."""
        if name in self._mapped:
            return self._mapped[name].get_slice(name)[where]
        return self._pickled[name][where]

    def names(self, wanted: Mapping[str, tuple[int, ...]], *, tied: bool) -> dict[str, str]:
        """Map a model's names to names in the files; missing tensors are left out.

        Args:
            wanted: shapes by the model's names.
            tied: embedding and head are one tensor.
        """
        found = {}
        for name, shape in wanted.items():
            also = [TIED[name]] if tied and name in TIED else []
            for stored in (name, name.removeprefix(PREFIX), *also):
                if self.shapes.get(stored) == tuple(shape):
                    found[name] = stored
                    break
        return found


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights; none if the folder has no weights."""
    # In transformers' order.
    return weight_files(folder) or weight_files(folder, *PICKLED)
