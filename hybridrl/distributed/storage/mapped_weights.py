"""A checkpoint's weights as they lie in its files, part by part.

Files are mapped into memory: a part is a view of one, in the dtype that is stored, and the kernel
reads its pages when they are used and takes them back when somebody else needs the memory.
"""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# A part of a tensor: what is taken of each dim.
Part = tuple[slice, ...]

# In transformers' order: the first that is there has the weights.
SINGLE, INDEXED = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEXED = "pytorch_model.bin", "pytorch_model.bin.index.json"

# Of names in the models that are supported. Folders of a backbone alone are without the prefix;
# of two tied tensors a folder may have either.
PREFIX, TIED = "model.", {"model.embed_tokens.weight": "lm_head.weight"}


class MappedWeights:
    """The weights of a Hugging Face folder: *.safetensors or, without these, *.bin.

    Args:
        folder: of the checkpoint. Of what is pickled tensors alone are taken, and a file from
            before torch 1.6, which cannot be mapped, is in memory as a whole.

    Attributes:
        shapes: by the names that the files have.
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
        """Map a part of the tensor that a file has under this name: a view of the file, on CPU."""
        if name in self._mapped:
            return self._mapped[name].get_slice(name)[where]
        return self._pickled[name][where]

    def names(self, wanted: Mapping[str, tuple[int, ...]], *, tied: bool) -> dict[str, str]:
        """Find a model's tensors by their names in the files; those that these lack are left out.

        Args:
            wanted: shapes by the model's names.
            tied: whether embedding and head are one.
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
    """List the files that have the weights; none if the folder has no weights at all."""
    for single, indexed in ((SINGLE, INDEXED), (PICKLED, PICKLED_INDEXED)):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / indexed).is_file():
            index = json.loads((folder / indexed).read_text(encoding="utf-8"))
            return [folder / name for name in sorted(set(index["weight_map"].values()))]
    return []
