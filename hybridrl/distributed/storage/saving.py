"""Writes a sharded state while training goes on, with torch.distributed.checkpoint.

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
from hybridrl.distributed.groups import NO_LIMIT
from hybridrl.distributed.process_memory import garbage_collection_off
from hybridrl.distributed.storage.shard_files import ShardPlanner, ShardWriter
from hybridrl.distributed.storage.staging import Staging

logger = logging.getLogger(__name__)


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
        self.group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
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
    """What the first rank's disk says.

    Raises:
        RuntimeError: a rank failed otherwise.
    """
    errors = [failure.failures[rank][0] for rank in sorted(failure.failures)]
    if not all(isinstance(error, OSError) for error in errors):
        raise RuntimeError(f"the checkpoint could not be written: {failure}") from None
    return str(errors[0])
