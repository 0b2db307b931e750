"""Sender: sends the actor's weights to engines on other ranks."""

import random
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import SenderConfig
from hybridrl.distributed.mesh import device_of, everyone
from hybridrl.distributed.part_timer import PartTimer
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import sender
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.shadow import wait_for_peers


class SenderWorker(Worker):
    """Worker on each rank that trains, if others sample; counterpart of their `ShadowCopy`."""

    config_class = SenderConfig
    config: SenderConfig

    def __init__(self, config: SenderConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        # As vLLM does on the ranks that it is on, before other roles are built.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def connect(self, roles: dict[str, Any]) -> None:
        """Plan the reshard from the actor to the engines of other ranks."""
        super().connect(roles)
        rollout, self.actor = self.config.rollout, roles["actor"]
        dtype, tp = getattr(torch, rollout.dtype.value), rollout.tensor_parallel_size
        side = sender(self.actor.named_shards(), self.mesh, dtype, everyone(), tp)
        self.resharder = Resharder(*side, rollout.reshard_bucket_mb)

    @on_all_ranks(Dispatch.BROADCAST)
    def send(self, version: int) -> dict[str, float]:
        """Send the actor's current weights, number `version`, while the engines sample.

        Returns:
            Seconds of this rank: `onload_s` (actor), `engines_s` (until the engines receive), and
            those of `Resharder.sync`.

        Raises:
            ReshardError: on all ranks, if the fingerprint of a parameter differs.
        """
        timer = PartTimer(device_of(self.mesh))
        with timer.part("onload_s"):
            self.actor.begin()
        with timer.part("engines_s"):
            wait_for_peers(everyone())
        verify = self.config.rollout.verify_reshard
        return timer.seconds | self.resharder.sync(version, verify=verify, kept=True)
