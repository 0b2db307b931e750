"""Loading of sharded state: in place under any sharding, or whole, without a process group.

Files are safetensors in the format of torch.distributed.checkpoint's Hugging Face storage. No other
file in the folder is opened, so a load never executes code.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.distributed import position

# Number of names that a message lists.
MAX_NAMED = 5


class StoredTensor(NamedTuple):
    """Shape and dtype of a whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class StoredState:
    """Folder of shards, with its tensors by key; only headers are read before `read`.

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
        for chunk in self._chunks[key]:
            file = self._files[MetadataIndex(key, chunk.offsets)]
            if file not in self._opened:
                self._opened[file] = safe_open(file, framework="pt")
            place = zip(chunk.offsets, chunk.sizes, strict=True)
            where = tuple(slice(start, start + length) for start, length in place)
            whole[where] = self._opened[file].get_tensor(key)
        return whole


def differences(
    state: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], prefix: str
) -> list[str]:
    """Describe differences of keys with a prefix between state and checkpoint, one text a kind."""
    theirs = {key: found for key, found in stored.items() if key.startswith(prefix)}
    ours = {k: StoredTensor(tuple(t.shape), t.dtype) for k, t in state.items()}
    differ = [
        f"{key} is {theirs[key]} there and {mine} here"
        for key, mine in ours.items()
        if key in theirs and theirs[key] != mine
    ]
    found = [
        ("lacks", [key for key in ours if key not in theirs]),
        ("has besides", [key for key in theirs if key not in ours]),
        ("differs:", differ),
    ]
    return [f"{what} {_listed(names)}" for what, names in found if names]


@torch.no_grad()
def load_in_place(
    state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors, or DTensors under any sharding, from a folder of shards of any number of ranks.

    A collective over the group, of gloo; the state is without `differences`.

    Raises:
        RuntimeError: a rank could not read it.
    """
    detached: dict[str, Any] = {key: tensor.detach() for key, tensor in state.items()}
    reader = HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(detached, storage_reader=reader, planner=_LoadPlanner(), process_group=group)
    except CheckpointException as failure:
        # Not an Exception: error handlers would not catch it.
        raise RuntimeError(f"{folder} could not be read: {failure}") from None


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Load planner that publishes the progress as position."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_read = 0

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._num_read += 1
        position.at("part read", self._num_read)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
