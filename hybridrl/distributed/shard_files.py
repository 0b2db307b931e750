"""Shards in files: which rank writes which, and the safetensors file that it writes.

The format is that of torch's Hugging Face storage: safetensors whose header says where in the
whole tensors the parts lie. Its own writer would copy a rank's state three times before the first
byte is written; here the file is written from the one host copy, and hashed on the way.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hybridrl.checkpoint.durable import sync_folder
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.distributed.staging import StagedShard, Staging

# The disk gets what was written after so many bytes, so that memory does not fill with it.
SYNC_BYTES = 256 * 2**20

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardPlanner(dcp.DefaultSavePlanner):
    """Plans to write what is staged. What several ranks have is written by one of them.

    Args:
        shards: of this rank, by key.
        planned: called once the plan is there.
    """

    def __init__(self, shards: Mapping[str, StagedShard], planned: Callable[[], object]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards
        self._planned = planned

    def create_local_plan(self) -> SavePlan:
        """One item per shard, but for those that are empty where the tensor is not."""
        kept = {key: s for key, s in self._shards.items() if s.num_bytes or 0 in s.size}
        self.plan = SavePlan([_item(key, shard) for key, shard in kept.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: who writes what; without the index of all shards, which no file holds."""
        plans, _ = super().create_global_plan(all_plans)
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        self._planned()
        return super().finish_plan(new_plan)


class ShardWriter(HuggingFaceStorageWriter):
    """Writes this rank's part of a plan into one file, from the host copy.

    Args:
        folder: where.
        staging: the host copy.

    Attributes:
        files: what was written, by name.
        num_bytes: written so far.
    """

    def __init__(self, folder: Path, staging: Staging) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self._folder = folder
        self._staging = staging
        self.files: dict[str, FileRecord] = {}
        self.num_bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync the file; it is there when this returns.

        Raises:
            OSError: the disk does not take it; with the file's name.
        """
        shards = {item.index.fqn: self._staging.shards[item.index.fqn] for item in plan.items}
        if shards:
            name = f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            path = self._folder / name
            try:
                self.files[name] = self._write(path, shards)
                sync_folder(self._folder)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # the format has no index that would be made of them
        return done

    def _write(self, path: Path, shards: Mapping[str, StagedShard]) -> FileRecord:
        content, synced = hashlib.sha256(), 0
        with path.open("wb") as file:
            for part in self._parts(shards):
                content.update(part)
                file.write(part)
                self.num_bytes += len(part)
                if self.num_bytes - synced >= SYNC_BYTES:
                    synced = self.num_bytes
                    file.flush()
                    os.fdatasync(file.fileno())
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(self.num_bytes, content.hexdigest())

    def _parts(self, shards: Mapping[str, StagedShard]) -> Iterator[bytes | memoryview]:
        yield header(shards)
        for shard in shards.values():
            yield from self._staging.contents(shard)


def header(shards: Mapping[str, StagedShard]) -> bytes:
    """The head of a safetensors file: where each shard's bytes are, and where it belongs.

    Source: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {}
    offsets, end = {}, 0
    for key, shard in shards.items():
        place = [end, end + shard.num_bytes]
        entries[key] = {
            "dtype": DTYPES[shard.dtype],
            "shape": list(shard.shape),
            "data_offsets": place,
        }
        offsets[key] = {SAVED_OFFSETS_KEY: list(shard.offsets)}
        end = place[1]
    about = {"format": "pt", "DCP_VERSION": "1.0", CUSTOM_METADATA_KEY: json.dumps(offsets)}
    text = json.dumps({"__metadata__": about, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _item(key: str, shard: StagedShard) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(key, shard.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=shard.offsets, sizes=shard.shape),
            properties=TensorProperties(dtype=shard.dtype),
            size=shard.size,
        ),
    )
