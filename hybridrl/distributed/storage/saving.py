"""Asynchronous save of sharded state; training blocks only while it is copied to the host.

Staging                      Saver's thread, on every rank
host copy of the shards  ->  choice of the rank that writes each shard: replicas are written once
                         ->  shard-00001.safetensors, ..: header, then bytes from the host copy
                         ->  fsync; errors of one rank reach all
                         ->  saved.json: results of all ranks, for the driver

The format is that of torch's Hugging Face storage: safetensors with the shards' offsets in the
header. torch's own writer copies a rank's state three times; this one writes from one host copy.
"""

import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.files import sync_folder
from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.checkpoint.saved import SaveResult, write_results
from hybridrl.distributed import position
from hybridrl.distributed.background import run_in_background
from hybridrl.distributed.mesh import NO_LIMIT
from hybridrl.distributed.offload import HostBuffer, aligned
from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.storage.safetensors_file import header, write_parts
from hybridrl.distributed.torch_compat import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, local_part

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class StagedShard(NamedTuple):
    """Shard of a tensor, at `offsets` in it; `start` is its first byte in the staging buffer."""

    offsets: torch.Size
    shape: torch.Size
    dtype: torch.dtype
    start: int
    num_bytes: int


class Staging:
    """Host memory for one copy of a state, page-locked if the device is a GPU, reused by each save.

    `shards` are the staged shards by key, in `num_bytes`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._host = HostBuffer(pinned=self._is_cuda)
        self._prepared: Future[None] | None = None
        self.clear()

    def prepare(self, num_bytes: int) -> None:
        """Allocate memory in a thread that `stage` waits for: pinning takes a second per GB."""

        def grow() -> None:
            with torch.cuda.device(self._device) if self._is_cuda else nullcontext():
                self._host.grow(num_bytes)

        self._prepared = run_in_background(grow, name="prepare staging")

    def clear(self) -> None:
        """Drop all staged shards; the memory stays."""
        self.shards: dict[str, StagedShard] = {}
        self.num_bytes = 0

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Add copies of tensors, of DTensors their local parts, and wait for the copies.

        A plain tensor is the same on all ranks with its key. Contents must be on the device.
        """
        if self._prepared is not None:
            self._prepared.result()
        added: list[tuple[Tensor, StagedShard]] = []
        for key, tensor in tensors.items():
            assert key not in self.shards, key
            local, offsets = local_part(tensor)
            shard = StagedShard(offsets, local.shape, local.dtype, self.num_bytes, local.nbytes)
            self.shards[key] = shard
            self.num_bytes += aligned(shard.num_bytes)
            added.append((local, shard))
        self._host.grow(self.num_bytes)
        for number, (local, shard) in enumerate(added, 1):
            position.at("staged tensor", number, len(added))
            content = local.contiguous().view(-1).view(torch.uint8)
            for on_device, on_host in self._host.pairs(content, shard.start):
                on_host.copy_(on_device, non_blocking=True)
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def file(self, shards: Mapping[str, StagedShard]) -> Iterator[bytes | memoryview]:
        """Yield a file of some of the shards, piece by piece."""
        offsets = {key: {SAVED_OFFSETS_KEY: list(shard.offsets)} for key, shard in shards.items()}
        about = {"format": "pt", "DCP_VERSION": "1.0", CUSTOM_METADATA_KEY: json.dumps(offsets)}
        yield header({key: (shard.dtype, shard.shape) for key, shard in shards.items()}, about)
        for shard in shards.values():
            for piece in self._host.slices(shard.start, shard.num_bytes):
                yield memoryview(piece.numpy())


class Saver:
    """Background writer of staged state; one save at a time.

    Construction is a collective over all ranks. The thread has a process group of its own, since
    its collectives run concurrently with training. `written` counts the current save's bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self.written = 0
        self._group = dist.new_group(backend="gloo", timeout=NO_LIMIT)

    def begin(self, folder: Path, subfolder: str) -> Future[SaveResult]:
        """Start to write the staged state to folder/subfolder; nothing may be staged meanwhile."""
        self.written = 0
        return run_in_background(self._save, folder, subfolder, name="write checkpoint")

    def _save(self, folder: Path, subfolder: str) -> SaveResult:
        start = time.perf_counter()
        shards, error, files = self._own_shards(), None, {}
        name = f"{subfolder}/shard-{dist.get_rank() + 1:05d}.safetensors"
        try:
            (folder / subfolder).mkdir(parents=True, exist_ok=True)
            if shards:
                files[name] = self._write(folder / name, shards)
        except OSError as failure:
            error = str(failure)
            with suppress(OSError):  # room for the results on a full disk
                (folder / name).unlink()
        error = next(filter(None, self._gathered(error)), None)
        seconds = time.perf_counter() - start
        logger.info("checkpoint: %s", error or f"{self.written / 2**30:.2f} GiB in {seconds:.1f} s")
        result = SaveResult(files if error is None else {}, seconds, error)
        results = self._gathered(result)
        if dist.get_rank() == 0:
            write_results(folder, results)
        return result

    @garbage_collection_off()
    def _own_shards(self) -> dict[str, StagedShard]:
        """Choose the shards that this rank writes: each once, evenly over the ranks that hold it.

        Empty shards are left out, unless the whole tensor is empty.
        """
        held = {
            f"{key} {tuple(shard.offsets)}": key
            for key, shard in self.staging.shards.items()
            if shard.num_bytes or not any(shard.offsets)
        }
        sizes = {place: self.staging.shards[key].num_bytes for place, key in held.items()}
        everywhere = self._gathered(sizes)
        holders = defaultdict(list)
        for rank, places in enumerate(everywhere):
            for place in places:
                holders[place].append(rank)
        load = [0] * len(everywhere)
        own = {}
        for place, ranks in holders.items():
            writer = min(ranks, key=load.__getitem__)
            load[writer] += everywhere[writer][place]
            if writer == dist.get_rank():
                own[held[place]] = self.staging.shards[held[place]]
        return own

    def _write(self, path: Path, shards: Mapping[str, StagedShard]) -> FileRecord:
        """Write a file and sync it to disk."""
        content = hashlib.sha256()

        def noted() -> Iterator[bytes | memoryview]:
            for part in self.staging.file(shards):
                content.update(part)
                self.written += len(part)
                yield part

        write_parts(path, noted())
        sync_folder(path.parent)
        return FileRecord(self.written, content.hexdigest())

    def _gathered(self, value: _T) -> list[_T]:
        values: list[_T] = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values
