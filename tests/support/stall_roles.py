"""Roles for test_stalls.py: one stops in the middle of a reshard, one takes its time."""

import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from hybridrl.distributed import position
from hybridrl.distributed.forward.sequence_parallel import sequence_group
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from tests.support.reshard_ranks import Side


@dataclass(kw_only=True)
class StallConfig:
    """With `hangs`, rank 1 hangs while the role is built."""

    worker: str = "tests.support.stall_roles.Staller"
    hangs: bool = False


class Staller(Worker):
    config_class = StallConfig  # type: ignore[assignment]

    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.impatient = dist.new_group(timeout=timedelta(seconds=1), group_desc="impatient")
        sequence_group(2)
        if config.hangs and dist.get_rank() == 1:
            time.sleep(600)
        self.side = Side(1, mesh, by_columns=False, device="cpu")
        self.side.take_weights(seed=0)
        self.resharder = self.side.resharder(bucket_elements=64)
        self.resharder.sync(0, verify=True)  # the first takes longest, which is no stall
        self.start = self.resharder._executors[-1]._start_bucket
        self.calls = 0

    @on_all_ranks(Dispatch.BROADCAST)
    def reshard(self, who):
        """Move random weights into a toy engine; rank `who` stops before it sends bucket 3."""
        store = dist.distributed_c10d._get_default_store()
        self.calls += 1
        further = f"another rank is in bucket 3 of call {self.calls}"

        def start_or_stop(number, *arguments, **options):
            if (dist.get_rank(), number) == (who, 2):
                store.wait([further], timedelta(seconds=20))
                # Sent to the process, it could reach another thread first; this one would go on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                time.sleep(1.0)  # told to go on and to write its stack, it is still here
            if dist.get_rank() != who and number == 3:
                store.set(further, "")
            return self.start(number, *arguments, **options)

        self.resharder._executors[-1]._start_bucket = start_or_stop
        self.resharder.sync(0, verify=True)
        return self.side.wrong(self.side.take_weights(seed=0))

    @on_all_ranks(Dispatch.BROADCAST)
    def walk(self, steps, seconds):
        """Get further, slowly, on rank 1; the others wait for it."""
        for step in range(steps if dist.get_rank() == 1 else 0):
            position.at("step", step + 1, steps)
            time.sleep(seconds)
        dist.barrier(self.impatient)

    @on_all_ranks(Dispatch.BROADCAST)
    def limits(self):
        """After how long collectives of each process group give up, by its description."""
        cpu = torch.device("cpu")
        groups = dist.distributed_c10d._pg_map
        return {g.group_desc: g._get_backend(cpu).options._timeout for g in groups}
