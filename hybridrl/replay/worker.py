"""Replay worker: recomputes an update of actor or critic without taking the step."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.config.schema import ShardedConfig
from hybridrl.data.batch import Totals
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed import position
from hybridrl.distributed.fsdp import begin_micro_batch
from hybridrl.distributed.torch_compat import local_tensor
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.base import Dispatch, Worker, on_all_ranks
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.model_worker import load_trained_weights

# Outputs of the model, by role.
OUTPUTS = {"actor": "log_probs", "critic": "values"}


@dataclass
class MicroBatch:
    """Loss and gradient of one micro-batch, computed alone.

    Attributes:
        place: epoch, mini-batch and micro-batch, counted from 0.
        responses: indices into the rank's batch; in `Findings` into the whole batch.
        loss: of this rank.
        gradient_norm: over all ranks' micro-batches at this place.
        rank: set in `Findings`.
    """

    place: tuple[int, int, int]
    responses: list[int]
    loss: float
    gradient_norm: float
    outputs_finite: bool
    rank: int = 0

    def bad(self, role: str) -> list[str]:
        """Name the non-finite values."""
        finite = {
            OUTPUTS[role]: self.outputs_finite,
            "loss": math.isfinite(self.loss),
            "gradient": math.isfinite(self.gradient_norm),
        }
        return [name for name, is_finite in finite.items() if not is_finite]


@dataclass(kw_only=True)
class ReplayConfig(ShardedConfig):
    """Config of a replay of the update of `role`, "actor" or "critic"."""

    worker: str = "hybridrl.replay.worker.ReplayWorker"
    role: str


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
    def examine_update(self, batch: RankBatch, kl_coef: float) -> list[MicroBatch]:
        """Compute loss and gradient of each micro-batch of an update alone; takes no step."""
        worker = self.trained
        worker.begin()
        if isinstance(worker, CriticWorker):
            minis, loss, outputs = batch.mini_batches(), worker.value_loss, worker.forward
        else:
            worker.kl_coef = kl_coef
            minis, loss = batch.policy_mini_batches(), worker.policy_loss
            outputs = worker.log_probs
        places = [(e, m) for e, minis in enumerate(batch.epochs) for m in range(len(minis))]
        results: list[MicroBatch] = []
        for (epoch, mini), (micros, totals) in zip(places, minis, strict=True):
            for index, micro in enumerate(micros):
                position.at("micro-batch", len(results) + 1)
                with torch.no_grad():
                    outputs_finite = bool(outputs(micro).isfinite().all())
                begin_micro_batch(worker.model, worker.config.fsdp, last=True)
                value, _ = loss(micro, Totals(*(max(count, 1) for count in totals)))
                value.backward()
                norm = float(worker.optimizer.gradient_norm())
                worker.optimizer.drop_gradients()
                place, rows = (epoch, mini, index), batch.epochs[epoch][mini][index]
                numbers = float(value.detach()), norm, outputs_finite
                results.append(MicroBatch(place, rows, *numbers))
        return results

    @on_all_ranks(Dispatch.BROADCAST)
    def nonfinite_weights(self) -> dict[str, int]:
        """Count non-finite elements in this rank's shards of the weights, by name."""
        self.trained.begin()
        named = self.trained.model.named_parameters()
        counts = {name: int((~local_tensor(param).isfinite()).sum()) for name, param in named}
        return {name: count for name, count in counts.items() if count}

    @on_all_ranks(Dispatch.BROADCAST)
    def load_weights(self, folder: str) -> None:
        """Load the trained weights of a checkpoint; a collective."""
        with self.trained.state_on_device():
            load_trained_weights(self.trained, Path(folder), self.config.role)
