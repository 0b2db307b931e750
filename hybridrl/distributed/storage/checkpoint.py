"""Loading of sharded state: in place under any sharding, or whole; without communication.

Files are safetensors in the format of torch.distributed.checkpoint's Hugging Face storage. No other
file in the folder is opened, so a load never executes code.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.distributed import position
from hybridrl.distributed.torch_compat import local_part

# Number of names that a message lists.
MAX_NAMED = 5


class StoredTensor(NamedTuple):
    """Shape and dtype of a whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class StoredState:
    """Folder of shards, written by any number of ranks; only headers are read at first.

    `tensors` are its tensors by key.

    Raises:
        DamagedCheckpoint: parts of a tensor are missing.
    """

    def __init__(self, folder: Path) -> None:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        self._files = {index: info.relative_path for index, info in metadata.storage_data.items()}
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for key, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
                raise DamagedCheckpoint(folder.parent, folder.name, f"has only parts of {key}")
            self._chunks[key] = tensor.chunks
            self.tensors[key] = StoredTensor(tuple(tensor.size), tensor.properties.dtype)
        self._opened: dict[str, safe_open] = {}

    def read(self, key: str) -> Tensor:
        """Read a whole tensor, on CPU."""
        shape, dtype = self.tensors[key]
        whole = torch.empty(shape, dtype=dtype)
        self._fill(whole, [0] * len(shape), key)
        return whole

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Fill tensors, or this rank's parts of DTensors; the state is without `differences`."""
        for number, (key, tensor) in enumerate(state.items(), 1):
            position.at("loaded tensor", number, len(state))
            self._fill(*local_part(tensor.detach()), key)

    def _fill(self, part: Tensor, offsets: Sequence[int], key: str) -> None:
        """Fill the part of a tensor that begins at `offsets`, from all chunks that overlap it."""
        for chunk in self._chunks[key]:
            ours, theirs = [], []
            for start, length, begin, size in zip(
                offsets, part.shape, chunk.offsets, chunk.sizes, strict=True
            ):
                first, end = max(start, begin), min(start + length, begin + size)
                ours.append(slice(first - start, end - start))
                theirs.append(slice(first - begin, end - begin))
            if all(place.start < place.stop for place in ours):
                file = self._files[MetadataIndex(key, chunk.offsets)]
                if file not in self._opened:
                    self._opened[file] = safe_open(file, framework="pt")
                part[tuple(ours)] = self._opened[file].get_slice(key)[tuple(theirs)]


def differences(
    state: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], prefix: str
) -> list[str]:
    """Describe differences of keys with a prefix between state and checkpoint, one text a kind."""
    theirs = {key: tensor for key, tensor in stored.items() if key.startswith(prefix)}
    ours = {k: StoredTensor(tuple(t.shape), t.dtype) for k, t in state.items()}
    differ = [
        f"{key} is {theirs[key]} there and {mine} here"
        for key, mine in ours.items()
        if key in theirs and theirs[key] != mine
    ]
    kinds = [
        ("lacks", [key for key in ours if key not in theirs]),
        ("has besides", [key for key in theirs if key not in ours]),
        ("differs:", differ),
    ]
    return [f"{what} {_listed(names)}" for what, names in kinds if names]


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
