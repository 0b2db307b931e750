"""Writes a sharded state while training goes on, with torch.distributed.checkpoint.

    Staging                      Saver's thread, on every rank
    host copy of the shards  ->  plan over all ranks (replicas are written once)
                             ->  shard-00001.safetensors, ..: header, then bytes from the host copy
                             ->  fsync; errors of one rank reach all

The format is that of torch's Hugging Face storage: safetensors whose header says where in the
whole tensors the parts lie. Its own writer would copy a rank's state three times before the first
byte is written; here the file is written from the one host copy, and hashed on the way.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
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
from torch.futures import Future as TorchFuture

from hybridrl.checkpoint.durable import sync_folder
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.distributed.staging import StagedShard, Staging

logger = logging.getLogger(__name__)

# A rank waits so long for the slowest disk.
WRITE_TIMEOUT = timedelta(hours=2)
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


@dataclass(frozen=True)
class SaveResult:
    """What became of a save on this rank.

    Attributes:
        files: what this rank wrote, by path relative to the checkpoint; empty after an error.
        num_bytes: of the files.
        blocked_s: seconds for which training waited.
        seconds: it took to plan and to write, while training went on.
        error: why the disk of any rank did not take it, the same on all ranks; else None.
    """

    files: dict[str, FileRecord]
    num_bytes: int
    blocked_s: float
    seconds: float
    error: str | None


class Saver:
    """Writes what is staged in a thread of its own; one save at a time.

    Building one is a collective over all ranks: the thread has a process group of its own, since
    its collectives run beside those of training.

    Args:
        device: where the tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self.group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._writer: ShardWriter | None = None
        self._thread: Thread | None = None
        self._result: Future[SaveResult] = Future()

    @property
    def is_writing(self) -> bool:
        """Whether a save goes on: nothing may be staged."""
        return self._thread is not None and not self._result.done()

    @property
    def written(self) -> int:
        """Bytes that this save has written so far."""
        return 0 if self._writer is None else self._writer.num_bytes

    def begin(self, folder: Path, subfolder: str, blocked_s: float) -> None:
        """Begin to write what is staged; a collective of the threads of all ranks.

        Args:
            folder: of the checkpoint.
            subfolder: of it, for the shards; made if it is not there.
            blocked_s: how long training has waited.
        """
        assert not self.is_writing, "one save at a time"
        result = self._result = Future()
        writer = self._writer = ShardWriter(folder / subfolder, self.staging)

        def run() -> None:
            try:
                result.set_result(self._write(writer, subfolder, blocked_s))
            except BaseException as error:  # whoever polls gets it
                result.set_exception(error)

        self._thread = Thread(target=run, name="write checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> SaveResult | None:
        """What became of the last save; None while it goes on.

        Raises:
            RuntimeError: what no disk is to blame for.
        """
        assert self._thread is not None, "no save has begun"
        return self._result.result() if self._result.done() else None

    def wait(self, timeout_s: float) -> None:
        """Wait until a save that goes on is over, but not longer than this."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, writer: "ShardWriter", subfolder: str, blocked_s: float) -> SaveResult:
        start, error = time.perf_counter(), None
        planner = ShardPlanner(self.staging.shards)
        try:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as failure:
            error = _disk_error(failure)
        files = {} if error else {f"{subfolder}/{k}": v for k, v in writer.files.items()}
        num_bytes = sum(record.size for record in files.values())
        seconds = time.perf_counter() - start
        logger.info("checkpoint: %s", error or f"{num_bytes / 2**30:.2f} GiB in {seconds:.1f} s")
        return SaveResult(files, num_bytes, blocked_s, seconds, error)


class ShardPlanner(dcp.DefaultSavePlanner):
    """Plans to write what is staged. What several ranks have is written by one of them.

    Args:
        shards: of this rank, by key.
    """

    def __init__(self, shards: Mapping[str, StagedShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        """One item per shard that is not empty."""
        self.plan = SavePlan([_item(k, s) for k, s in self._shards.items() if s.num_bytes])
        return self.plan


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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
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
        done: TorchFuture[list[WriteResult]] = TorchFuture()
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


def _disk_error(failure: CheckpointException) -> str:
    """What the first rank's disk says.

    Raises:
        RuntimeError: a rank failed otherwise.
    """
    errors = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    if not all(isinstance(error, OSError) for error in errors):
        raise RuntimeError(f"the checkpoint could not be written: {failure}") from None
    return str(errors[0])
