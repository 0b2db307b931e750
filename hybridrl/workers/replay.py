"""Replay worker: recomputes an update of actor or critic without taking the step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridrl.config.schema import FSDPConfig, RoleConfig
from hybridrl.data.batch import Totals
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed import position
from hybridrl.distributed.fsdp import begin_micro_batch
from hybridrl.distributed.torch_compat import local_tensor
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.model_worker import load_trained_weights


class MicroBatchResult(NamedTuple):
    """Loss and gradient of one micro-batch, computed alone.

    `place` is epoch, mini-batch and micro-batch, counted from 0; `rows` are indices into the rank's
    batch. The loss is this rank's; the gradient norm is over all ranks' micro-batches there.
    """

    place: tuple[int, int, int]
    rows: list[int]
    loss: float
    gradient_norm: float
    outputs_finite: bool


@dataclass(kw_only=True)
class ReplayConfig(RoleConfig):
    """Config of a replay of the update of `role`, "actor" or "critic"."""

    worker: str = "hybridrl.workers.replay.ReplayWorker"
    role: str
    fsdp: FSDPConfig


class ReplayWorker(Worker):
    """Examines updates of the actor or critic in the same process."""

    config_class = ReplayConfig
    config: ReplayConfig

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Ranks that share each sequence."""
        return config.fsdp.ulysses_size

    def connect(self, roles: dict[str, Worker]) -> None:
        """Find the worker to examine."""
        worker = roles[self.config.role]
        assert isinstance(worker, ActorWorker | CriticWorker), type(worker)
        self.trained = worker

    @on_all_ranks(Dispatch.SHARD_DP)
    def examine_update(self, batch: RankBatch, kl_coef: float) -> list[MicroBatchResult]:
        """Compute loss and gradient of each micro-batch of an update alone; takes no step."""
        worker = self.trained
        worker.begin()
        if isinstance(worker, CriticWorker):
            minis, loss, outputs = batch.mini_batches(), worker.value_loss, worker.forward
        else:
            worker.kl_coef = kl_coef
            minis, loss = batch.policy_mini_batches(), worker.policy_loss
            outputs = worker.log_probs
        places = [
            (epoch, mini, rows)
            for epoch, of_epoch in enumerate(batch.epochs)
            for mini, rows in enumerate(of_epoch)
        ]
        results: list[MicroBatchResult] = []
        for (epoch, mini, rows), (micros, totals) in zip(places, minis, strict=True):
            for index, micro in enumerate(micros):
                position.at("micro-batch", len(results) + 1)
                with torch.no_grad():
                    outputs_finite = bool(outputs(micro).isfinite().all())
                begin_micro_batch(worker.model, worker.config.fsdp, last=True)
                value, _ = loss(micro, Totals(*(max(count, 1) for count in totals)))
                value.backward()
                norm = float(worker.optimizer.gradient_norm())
                worker.optimizer.drop_gradients()
                place, number = (epoch, mini, index), float(value.detach())
                results.append(MicroBatchResult(place, rows[index], number, norm, outputs_finite))
        return results

    @on_all_ranks(Dispatch.BROADCAST)
    def nonfinite_weights(self) -> dict[str, int]:
        """Count non-finite elements in this rank's shards of the weights, by name."""
        self.trained.begin()
        counts = {}
        for name, param in self.trained.model.named_parameters():
            count = int(local_tensor(param).isfinite().logical_not().sum())
            if count:
                counts[name] = count
        return counts

    @on_all_ranks(Dispatch.BROADCAST)
    def load_weights(self, folder: str) -> None:
        """Load the trained weights of a checkpoint; a collective."""
        with self.trained.state_on_device():
            load_trained_weights(self.trained, Path(folder), self.config.role)
