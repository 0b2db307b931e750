"""Asynchronous save of sharded state, with torch.distributed.checkpoint.

Staging                      Saver's thread, on every rank
host copy of the shards  ->  plan over all ranks (replicas are written once)
                         ->  shard-00001.safetensors, ..: header, then bytes from the host copy
                         ->  fsync; errors of one rank reach all

The format is that of torch's Hugging Face storage: safetensors with the shards' offsets in the
header. torch's own writer copies a rank's state three times before the first write. This one writes
from the one host copy and hashes on the way.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from hybridrl.checkpoint.files import sync_folder
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.distributed.mesh import NO_LIMIT
from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.storage.safetensors_file import header, write_parts
from hybridrl.distributed.storage.staging import StagedShard, Staging, in_thread
from hybridrl.distributed.torch_compat import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveResult:
    """Result of a save on this rank.

    Attributes:
        files: files of this rank, by path relative to the checkpoint; empty after an error.
        num_bytes: bytes of the files.
        blocked_s: seconds during which training waited.
        seconds: seconds of planning and writing in the background.
        error: disk error of any rank, the same on all ranks; else None.
    """

    files: dict[str, FileRecord]
    num_bytes: int
    blocked_s: float
    seconds: float
    error: str | None


class Saver:
    """Background writer of staged state; one save at a time.

    Construction is a collective over all ranks. The thread has its own process group, because its
    collectives run concurrently with those of training.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self.group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._writer: _ShardWriter | None = None
        self._result: Future[SaveResult] | None = None

    @property
    def is_writing(self) -> bool:
        """True during a save, when nothing may be staged."""
        return self._result is not None and not self._result.done()

    @property
    def written(self) -> int:
        """Bytes written by the current save."""
        return 0 if self._writer is None else self._writer.num_bytes

    def begin(self, folder: Path, subfolder: str, blocked_s: float) -> None:
        """Start to write the staged state to folder/subfolder; a collective of threads."""
        assert not self.is_writing, "one save at a time"
        writer = self._writer = _ShardWriter(folder / subfolder, self.staging)
        self._result = in_thread(
            "write checkpoint", lambda: self._write(writer, subfolder, blocked_s)
        )

    def poll(self) -> SaveResult | None:
        """Return the result of the last save; None while it runs.

        Raises:
            RuntimeError: a rank failed other than by a disk error.
        """
        assert self._result is not None, "no save has begun"
        return self._result.result() if self._result.done() else None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of a running save, at most `timeout_s`."""
        if self._result is not None:
            wait([self._result], timeout_s)

    def _write(self, writer: "_ShardWriter", subfolder: str, blocked_s: float) -> SaveResult:
        start, error = time.perf_counter(), None
        try:
            with ExitStack() as in_plan:
                in_plan.enter_context(garbage_collection_off())
                planner = _ShardPlanner(self.staging.shards, in_plan.close)
                dcp.save({}, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as failure:
            error = _disk_error(failure)
        files = {} if error else {f"{subfolder}/{k}": v for k, v in writer.files.items()}
        num_bytes = sum(record.size for record in files.values())
        seconds = time.perf_counter() - start
        logger.info("checkpoint: %s", error or f"{num_bytes / 2**30:.2f} GiB in {seconds:.1f} s")
        return SaveResult(files, num_bytes, blocked_s, seconds, error)


def _disk_error(failure: CheckpointException) -> str:
    """Return the disk error of the first failed rank; raise if one failed for another reason."""
    errors = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    if not all(isinstance(error, OSError) for error in errors):
        raise RuntimeError(f"the checkpoint could not be written: {failure}") from None
    return str(errors[0])


class _ShardPlanner(dcp.DefaultSavePlanner):
    """Planner of a save of staged shards; calls `planned` once the plan is complete."""

    def __init__(self, shards: Mapping[str, StagedShard], planned: Callable[[], object]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards
        self._planned = planned

    def create_local_plan(self) -> SavePlan:
        """Plan one item per shard, without empty shards of tensors that are not empty."""
        kept = {key: s for key, s in self._shards.items() if s.num_bytes or 0 in s.size}
        self.plan = SavePlan([_item(key, shard) for key, shard in kept.items()])
        return self.plan

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], metadata.Metadata]:
        """Assign shards to ranks, on rank 0; the index of all shards is dropped, not saved."""
        plans, _ = super().create_global_plan(all_plans)
        return plans, metadata.Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._planned()
        return super().finish_plan(new_plan)


class _ShardWriter(HuggingFaceStorageWriter):
    """Writer of this rank's shards into one file, from the host copy.

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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the file and sync it to disk; an OSError names it."""
        shards = {item.index.fqn: self._staging.shards[item.index.fqn] for item in plan.items}
        if shards:
            name = f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            content = hashlib.sha256()

            def note(part: bytes | memoryview) -> None:
                content.update(part)
                self.num_bytes += len(part)

            write_parts(self._folder / name, self._parts(shards), note)
            self.files[name] = FileRecord(self.num_bytes, content.hexdigest())
            sync_folder(self._folder)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([])  # used only for an index, which the format does not have
        return done

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
        index=metadata.MetadataIndex(key, shard.offsets),
        type=planning.WriteItemType.SHARD,
        tensor_data=planning.TensorWriteData(
            chunk=metadata.ChunkStorageMetadata(offsets=shard.offsets, sizes=shard.shape),
            properties=metadata.TensorProperties(dtype=shard.dtype),
            size=shard.size,
        ),
    )
