"""Roles outside the package for test_controller.py: they add, fail, die, hang and hold memory."""

import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist

from hybridrl.config.errors import ConfigError
from hybridrl.data.shardable import Piece, Shardable
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks

WORKER = "tests.support.controller_roles.Adder"


@dataclass(kw_only=True)
class AdderConfig:
    worker: str = WORKER
    engine: int = 1
    shared_memory: str | None = None
    ahead: str = ""
    api_key: str | None = None


@dataclass(frozen=True)
class Numbers(Shardable):
    """Numbers dealt like cards: shard k of n gets those at k, k + n, k + 2n..."""

    values: list[int]

    def pieces(self, num_shards: int) -> list[list[Piece]]:
        return [[partial(Numbers, self.values[k::num_shards])] for k in range(num_shards)]

    def join(self, results: Sequence["Numbers"]) -> "Numbers":
        joined = [0] * len(self.values)
        for k, part in enumerate(results):
            joined[k :: len(results)] = part.values
        return Numbers(joined)


class UnpicklableError(Exception):
    def __init__(self, message: str, lock: object) -> None:
        super().__init__(message)
        self.lock = lock


class Adder(Worker):
    config_class = AdderConfig  # type: ignore[assignment]

    def __init__(self, config, mesh):
        super().__init__(config, mesh)
        self.rank = dist.get_rank()
        if config.shared_memory is not None:
            path = Path(f"{config.shared_memory}_{self.rank}")
            path.write_bytes(bytes(4096))
            with path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 4096)
        print(f"printed by rank {self.rank} with the key {config.api_key}")
        logging.getLogger(__name__).info("logged with the key %s", config.api_key)
        os.write(2, b"written below Python\n")

    @classmethod
    def ranks_per_shard(cls, config):
        return config.engine

    @classmethod
    def modules_ahead(cls, config, device_type):
        assert device_type == "cpu"
        return [config.ahead]

    def connect(self, roles):
        self.others = sorted(roles)

    @on_all_ranks(Dispatch.SHARD_DP)
    def add(self, numbers, amount, *, times=1):
        """Results carry the rank in the thousands."""
        return Numbers([v + amount * times + 1000 * self.rank for v in numbers.values])

    @on_all_ranks(Dispatch.SHARD_DP)
    def add_slowly(self, numbers, seconds):
        """Add nothing; take some time over it."""
        time.sleep(seconds)
        return self.add(numbers, 0)

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def total(self, numbers):
        total = torch.tensor(sum(numbers.values))
        dist.all_reduce(total)
        return {"total": int(total), "rank": self.rank}

    @on_all_ranks(Dispatch.BROADCAST)
    def about(self):
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "OMP_NUM_THREADS",
        )
        return {name: os.environ[name] for name in names} | {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "imported_by": sys.modules["tests.support.controller_ahead"].THREAD,
            "main_thread": threading.current_thread() is threading.main_thread(),
            "mesh": tuple(self.mesh.shape),
            "others": self.others,
            "pid": os.getpid(),
        }

    @on_all_ranks(Dispatch.RANK_ZERO)
    def who(self):
        return self.rank

    def unmarked(self):
        return None

    @on_all_ranks(Dispatch.BROADCAST)
    def complain(self, rank):
        """One rank raises what cannot be pickled, from a cause."""
        if self.rank == rank:
            try:
                {}["the root"]
            except KeyError as error:
                raise UnpicklableError("no way back", threading.Lock()) from error

    @on_all_ranks(Dispatch.BROADCAST)
    def refuse(self):
        raise ConfigError("rollout.dtype=float8: not on this device")

    @on_all_ranks(Dispatch.BROADCAST)
    def fail_in_collective(self, rank, how):
        """One rank fails while the others wait for it."""
        if self.rank == rank:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("the first domino")
            if how == "exit":
                sys.exit(3)
            self.sleep_at_this_place()
        dist.barrier()

    def sleep_at_this_place(self):
        time.sleep(600)
