"""Files of shards: plan of which rank writes which shard, and the writer.

The format is that of torch's Hugging Face storage: safetensors with the shards' offsets in the
header. torch's own writer copies a rank's state three times before the first write. This one writes
from the one host copy and hashes on the way.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
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

from hybridrl.checkpoint.files import sync_folder
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.distributed.storage.safetensors_file import header, write_parts
from hybridrl.distributed.storage.staging import StagedShard, Staging
from hybridrl.distributed.torch_compat import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY


class ShardPlanner(dcp.DefaultSavePlanner):
    """Planner of a save of staged shards; replicas are written once.

    Args:
        shards: shards of this rank, by key.
        planned: called once the plan is complete.
    """

    def __init__(self, shards: Mapping[str, StagedShard], planned: Callable[[], object]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards
        self._planned = planned

    def create_local_plan(self) -> SavePlan:
        """Plan one item per shard, without empty shards of tensors that are not empty."""
        kept = {key: s for key, s in self._shards.items() if s.num_bytes or 0 in s.size}
        self.plan = SavePlan([_item(key, shard) for key, shard in kept.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign shards to ranks, on rank 0; the index of all shards is dropped, not saved."""
        plans, _ = super().create_global_plan(all_plans)
        return plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the final plan of this rank."""
        self._planned()
        return super().finish_plan(new_plan)


class ShardWriter(HuggingFaceStorageWriter):
    """Writer of this rank's shards into one file, from the host copy.

    Args:
        folder: folder of the shards.
        staging: the host copy.

    Attributes:
        files: written files, by name.
        num_bytes: bytes written so far.
    """

    def __init__(self, folder: Path, staging: Staging) -> None:
        super().__init__(path=str(folder), save_distributed=True)
        self._folder = folder
        self._staging = staging
        self.files: dict[str, FileRecord] = {}
        self.num_bytes = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file and sync it to disk.

        Raises:
            OSError: a write failed, with the file's name.
        """
        shards = {item.index.fqn: self._staging.shards[item.index.fqn] for item in plan.items}
        if shards:
            name = f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            path = self._folder / name
            self.files[name] = self._write(path, shards)
            sync_folder(self._folder)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # used only for an index, which the format does not have
        return done

    def _write(self, path: Path, shards: Mapping[str, StagedShard]) -> FileRecord:
        content = hashlib.sha256()

        def note(part: bytes | memoryview) -> None:
            content.update(part)
            self.num_bytes += len(part)

        write_parts(path, self._parts(shards), note)
        return FileRecord(self.num_bytes, content.hexdigest())

    def _parts(self, shards: Mapping[str, StagedShard]) -> Iterator[bytes | memoryview]:
        yield shards_header(shards)
        for shard in shards.values():
            yield from self._staging.contents(shard)


def shards_header(shards: Mapping[str, StagedShard]) -> bytes:
    """Build the header of a file of shards, with their offsets in the whole tensors."""
    offsets = {key: {SAVED_OFFSETS_KEY: list(shard.offsets)} for key, shard in shards.items()}
    about = {"format": "pt", "DCP_VERSION": "1.0", CUSTOM_METADATA_KEY: json.dumps(offsets)}
    return header({key: (shard.dtype, shard.shape) for key, shard in shards.items()}, about)


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
