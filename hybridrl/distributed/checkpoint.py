"""Reads a sharded state: in place under any sharding, or whole, without a process group.

Files are safetensors as torch.distributed.checkpoint's Hugging Face storage has them. Nothing else
in the folder is opened: whatever could execute code when it is loaded stays unread.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.distributed import position

# Names that a message lists.
MAX_NAMED = 5


class StoredTensor(NamedTuple):
    """A whole tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What a folder of shards holds, by key; reads the files' headers only.

    Raises:
        DamagedCheckpoint: parts of a tensor are missing.
    """
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    stored = {}
    for key, tensor in sorted(metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata)
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise DamagedCheckpoint(folder.parent, folder.name, f"has only parts of {key}")
        stored[key] = StoredTensor(tuple(tensor.size), tensor.properties.dtype)
    return stored


def differences(
    state: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], prefix: str
) -> list[str]:
    """Why a state cannot be taken from a checkpoint: one text for each kind of difference.

    Args:
        state: by key.
        stored: in the checkpoint.
        prefix: keys that have it must be the same in both.
    """
    theirs = {key: found for key, found in stored.items() if key.startswith(prefix)}
    ours = {k: StoredTensor(tuple(t.shape), t.dtype) for k, t in state.items()}
    missing = [key for key in ours if key not in theirs]
    extra = [key for key in theirs if key not in ours]
    both = [key for key in ours if key in theirs]
    shapes = [
        f"{key} has the shape {theirs[key].shape} there and {ours[key].shape} here"
        for key in both
        if theirs[key].shape != ours[key].shape
    ]
    dtypes = [
        f"{key} is {theirs[key].dtype} there and {ours[key].dtype} here"
        for key in both
        if theirs[key].dtype != ours[key].dtype
    ]
    found = [("lacks", missing), ("has besides", extra), ("differs:", shapes + dtypes)]
    return [f"{what} {_listed(names)}" for what, names in found if names]


@torch.no_grad()
def load_in_place(
    state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors from a folder of shards; a collective over the group.

    Args:
        state: tensors, or DTensors however they are sharded, of which `differences` has none.
        folder: of shards, written by any number of ranks.
        group: gloo; None for the default group.

    Raises:
        RuntimeError: a rank could not read it.
    """
    detached = {key: tensor.detach() for key, tensor in state.items()}
    _load(detached, folder, group, alone=False)


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose keys begin with a prefix, whole, on CPU, by the rest of their keys.

    Needs no process group and no ranks beside this one.

    Raises:
        DamagedCheckpoint: parts of a tensor are missing.
    """
    stored = stored_tensors(folder)
    chosen = {key: found for key, found in stored.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): value for key, value in read_some(folder, chosen).items()}


def read_some(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Some of the tensors that `stored_tensors` has found, whole, on CPU; as `read_whole`."""
    state = {key: torch.empty(found.shape, dtype=found.dtype) for key, found in stored.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _load(state, folder, None, alone=True)
    return state


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Says in the process's position how far reading is."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_read = 0

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._num_read += 1
        position.at("part read", self._num_read)


def _load(
    state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None, *, alone: bool
) -> None:
    reader = HuggingFaceStorageReader(str(folder))
    try:
        dcp.load(
            state,
            storage_reader=reader,
            planner=_LoadPlanner(),
            process_group=group,
            no_dist=alone,
        )
    except CheckpointException as failure:
        # Not an Exception: whoever reports errors would let it pass.
        raise RuntimeError(f"{folder} could not be read: {failure}") from None


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
