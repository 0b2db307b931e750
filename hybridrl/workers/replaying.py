"""An update looked at instead of taken: what of it is not finite, response by response."""

from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.names import STATE
from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.schedule import MiniBatches, RankBatch
from hybridrl.distributed import position
from hybridrl.distributed.accumulation import begin_micro_batch
from hybridrl.distributed.collectives import NO_LIMIT
from hybridrl.distributed.storage.checkpoint import StoredState, differences, load_in_place
from hybridrl.workers.dispatch import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import WEIGHTS, TrainedWorker
from hybridrl.workers.training import Loss


class MicroBatchResult(NamedTuple):
    """A micro-batch of an update, without those before it.

    Attributes:
        place: epoch, mini-batch and micro-batch, counted from 0.
        rows: its responses, as indices into the rank's batch.
        loss: of this rank.
        gradient_norm: of all ranks' micro-batches at this place together.
        outputs_finite: whether what the model says of each token is.
    """

    place: tuple[int, int, int]
    rows: list[int]
    loss: float
    gradient_norm: float
    outputs_finite: bool


class ReplayedWorker(TrainedWorker):
    """A trained worker whose updates can be replayed."""

    @abstractmethod
    def outputs(self, micro: RolloutBatch) -> Tensor:
        """What the loss is computed from: one number per response token, on the device."""

    @abstractmethod
    def objective(self, batch: RankBatch, kl_coef: float) -> tuple[MiniBatches, Loss]:
        """The mini-batches of an update, and what it minimises on each of their micro-batches."""

    @on_all_ranks(Dispatch.SHARD_DP)
    def examine_update(self, batch: RankBatch, kl_coef: float) -> list[MicroBatchResult]:
        """Loss and gradient of every micro-batch of an update, each for itself; takes no step."""
        self.begin()
        minis, loss = self.objective(batch, kl_coef)
        places = [
            (epoch, mini, rows)
            for epoch, of_epoch in enumerate(batch.epochs)
            for mini, rows in enumerate(of_epoch)
        ]
        results: list[MicroBatchResult] = []
        for (epoch, mini, rows), (micros, totals) in zip(places, minis, strict=True):
            for index, micro in enumerate(micros):
                position.at("micro-batch", len(results) + 1)
                found = self._examine(micro, totals, loss)
                results.append(MicroBatchResult((epoch, mini, index), rows[index], *found))
        return results

    @on_all_ranks(Dispatch.BROADCAST)
    def nonfinite_weights(self) -> dict[str, int]:
        """Elements of this rank's shards of the weights that are not finite, by name."""
        self.begin()
        counts = {}
        for name, param in self.model.named_parameters():
            values = param.detach()
            local = values.to_local() if isinstance(values, DTensor) else values
            count = int(local.isfinite().logical_not().sum())
            if count:
                counts[name] = count
        return counts

    @on_all_ranks(Dispatch.BROADCAST)
    def load_weights(self, folder: str, role: str) -> None:
        """Take the trained weights from a checkpoint; a collective.

        Args:
            folder: of the checkpoint; its state/ has the shards.
            role: how the checkpoint calls this role.

        Raises:
            ConfigError: it holds those of another model.
        """
        path, trained = Path(folder) / STATE, self.training_state()
        state = {f"{role}.{k}": t for k, t in trained.items() if k.startswith(WEIGHTS)}
        found = differences(state, StoredState(path).tensors, f"{role}.{WEIGHTS}")
        if found:
            raise ConfigError(f"{path} holds other weights than the config's:\n" + "\n".join(found))
        with self.state_at_hand():
            load_in_place(state, path, dist.new_group(backend="gloo", timeout=NO_LIMIT))

    def _examine(
        self, micro: RolloutBatch, totals: Totals, loss: Loss
    ) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether the outputs are finite."""
        with torch.no_grad():
            outputs_finite = bool(self.outputs(micro).isfinite().all())
        begin_micro_batch(self.model, self.config.fsdp, last=True)
        totals = Totals(*(max(count, 1) for count in totals))
        value, _ = loss(micro, totals)
        value.backward()
        norm = self.optimizer.gradient_norm()
        self.optimizer.drop_gradients()
        return float(value.detach()), float(norm), outputs_finite
