"""The value function: values of response tokens, and clipped updates on one FSDP shard."""

from dataclasses import replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.algorithms.losses import value_loss
from hybridrl.config.schema import CriticConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.fsdp import load_sharded_critic
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import TrainedWorker
from hybridrl.workers.training import LossStats


class CriticWorker(TrainedWorker):
    """Worker that trains the value function. One instance per rank, each with one FSDP shard.

    To change the objective, subclass, override `value_loss`, and set
    `critic.worker=my_package.MyCriticWorker`.
    """

    config_class = CriticConfig
    config: CriticConfig

    def __init__(self, config: CriticConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.own(load_sharded_critic(config.model, config.fsdp, mesh, config.model.seed))

    @on_all_ranks(Dispatch.SHARD_DP)
    def compute_values(self, batch: RankBatch) -> Ragged:
        """Compute V(s_t) before each response token: ragged float32 on CPU, in the reward's unit.

        Rows are in the order of the first epoch's micro-batches.
        """
        return self.over_first_epoch(batch, self.forward)

    @on_all_ranks(Dispatch.SHARD_DP_REDUCED)
    def update(self, batch: RankBatch, step: int) -> dict[str, float]:
        """Take one optimizer step per mini-batch of `batch`; return metrics over all ranks.

        `batch` has values and returns; `step`, counted from 1, sets the learning rate.
        """
        with self.training(self.value_loss, step) as training:
            for micros, totals in batch.mini_batches():
                training.take_step(micros, totals)
        report = training.report()
        report["explained_variance"] = explained_variance(
            *(report.pop(moment) for moment in ("returns", "returns_2", "errors", "errors_2"))
        )
        return {f"critic/{name}": value for name, value in report.items()}

    def value_loss(self, micro: RolloutBatch, totals: Totals) -> tuple[Tensor, LossStats]:
        """Compute the loss: a sum over a micro-batch's tokens, divided by the mini-batch's."""
        mask = self.on_device(micro.response_mask)
        old_values, returns = self.on_device(micro.values), self.on_device(micro.returns)
        loss, sums = value_loss(
            self.forward(micro),
            old_values,
            returns,
            mask,
            value_clip=self.config.value_clip,
            num_tokens=totals.tokens,
        )
        reported = {"clip_fraction": sums["value_clip_fraction"], "error": sums["value_error"]}
        return loss, LossStats(reported | moments(returns, old_values, mask))

    def forward(self, micro: RolloutBatch) -> Tensor:
        """Compute V(s_t) before each response token, [R] float32, on the device."""
        # Values do not depend on the distributions.
        return self.model(self.pack(replace(micro, kept_ids=None, kept_counts=None)))


def moments(returns: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute the sums for `explained_variance` over the masked tokens; float64."""
    targets = returns.double().masked_fill(~mask, 0.0)
    errors = targets - values.double().masked_fill(~mask, 0.0)
    return {
        "returns": targets.sum(),
        "returns_2": targets.square().sum(),
        "errors": errors.sum(),
        "errors_2": errors.square().sum(),
    }


def explained_variance(returns: float, returns_2: float, errors: float, errors_2: float) -> float:
    """Compute 1 - Var(returns - values) / Var(returns) from means; 0 if the returns are constant.

    1 is perfect, 0 is no better than a constant. Values are from before the update.
    """
    variance = returns_2 - returns**2
    if variance <= 1e-12:
        return 0.0
    return 1.0 - (errors_2 - errors**2) / variance
