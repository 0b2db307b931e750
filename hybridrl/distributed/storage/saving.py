"""Asynchronous save of sharded state, with torch.distributed.checkpoint.

Staging                      Saver's thread, on every rank
host copy of the shards  ->  plan over all ranks (replicas are written once)
                         ->  shard-00001.safetensors, ..: header, then bytes from the host copy
                         ->  fsync; errors of one rank reach all
"""

import logging
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.distributed.mesh import NO_LIMIT
from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.storage.shard_files import ShardPlanner, ShardWriter
from hybridrl.distributed.storage.staging import Staging

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

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self.group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._writer: ShardWriter | None = None
        self._thread: Thread | None = None
        self._result: Future[SaveResult] = Future()

    @property
    def is_writing(self) -> bool:
        """True during a save, when nothing may be staged."""
        return self._thread is not None and not self._result.done()

    @property
    def written(self) -> int:
        """Bytes written by the current save."""
        return 0 if self._writer is None else self._writer.num_bytes

    def begin(self, folder: Path, subfolder: str, blocked_s: float) -> None:
        """Start to write the staged state; a collective of the threads of all ranks.

        Args:
            folder: folder of the checkpoint.
            subfolder: its subfolder for the shards; made if missing.
            blocked_s: seconds during which training has waited.
        """
        assert not self.is_writing, "one save at a time"
        result = self._result = Future()
        writer = self._writer = ShardWriter(folder / subfolder, self.staging)

        def run() -> None:
            try:
                result.set_result(self._write(writer, subfolder, blocked_s))
            except BaseException as error:  # raised by `poll`
                result.set_exception(error)

        self._thread = Thread(target=run, name="write checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> SaveResult | None:
        """Return the result of the last save; None while it runs.

        Raises:
            RuntimeError: a rank failed other than by a disk error.
        """
        assert self._thread is not None, "no save has begun"
        return self._result.result() if self._result.done() else None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of a running save, at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, writer: "ShardWriter", subfolder: str, blocked_s: float) -> SaveResult:
        start, error = time.perf_counter(), None
        try:
            with ExitStack() as planning:
                planning.enter_context(garbage_collection_off())
                planner = ShardPlanner(self.staging.shards, planning.close)
                dcp.save({}, storage_writer=writer, planner=planner, process_group=self.group)
        except CheckpointException as failure:
            error = _disk_error(failure)
        files = {} if error else {f"{subfolder}/{k}": v for k, v in writer.files.items()}
        num_bytes = sum(record.size for record in files.values())
        seconds = time.perf_counter() - start
        logger.info("checkpoint: %s", error or f"{num_bytes / 2**30:.2f} GiB in {seconds:.1f} s")
        return SaveResult(files, num_bytes, blocked_s, seconds, error)


def _disk_error(failure: CheckpointException) -> str:
    """Return the disk error of the first failed rank.

    Raises:
        RuntimeError: a rank failed other than by a disk error.
    """
    errors = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    if not all(isinstance(error, OSError) for error in errors):
        raise RuntimeError(f"the checkpoint could not be written: {failure}") from None
    return str(errors[0])
