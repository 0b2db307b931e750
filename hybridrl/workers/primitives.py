"""Actor whose gradients and optimizer steps are calls of their own, for `hybridrl.Service`.

The parts are those of `ActorWorker.update`: `Training.accumulate_gradients` and
`Optimizer.apply_gradients`. Weights, moments and gradients of other models, and weights of earlier
steps, are held in host memory by name; one set is on the device.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.algorithms.primitive_losses import fields_of, loss_of, loss_sum
from hybridrl.config.schema import ActorConfig
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.ragged import Ragged, concat
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed.forward.packing import to_device
from hybridrl.distributed.torch_compat import local_tensor
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.base import Dispatch, on_all_ranks
from hybridrl.workers.model_worker import OPTIM, WEIGHTS, trained_parameters
from hybridrl.workers.training import LossStats, Training

GRADIENTS = "gradients."
# Totals that divide nothing: losses of primitives are sums.
WHOLE = Totals(tokens=1, episodes=1)


class PrimitiveActor(ActorWorker):
    """Actor of a service."""

    def __init__(self, config: ActorConfig, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        # By name and key: this rank's shards.
        self.held: dict[str, dict[str, Tensor]] = {}

    @on_all_ranks(Dispatch.SHARD_DP)
    def forward_backward(
        self, batch: RankBatch, name: str, settings: Mapping[str, float]
    ) -> Ragged:
        """Add the gradient of a loss to that of earlier calls; return the targets' log-probs.

        They are ragged float32, nats, on CPU, rows in the order of the first epoch's micro-batches.
        The loss is a sum over the tokens of all ranks.
        """
        loss, settings = loss_of(name, settings)
        results: list[Ragged] = []

        def compute(micro: RolloutBatch, totals: Totals) -> tuple[Tensor, LossStats]:
            log_probs = self.log_probs(micro)
            fields = {name: to_device(x, self.device) for name, x in fields_of(loss, micro).items()}
            results.append(micro.responses.like(log_probs.detach()))
            return loss_sum(loss, settings, log_probs, fields), LossStats()

        self.begin()
        training = Training(self.optimizer, compute, self.config.fsdp)
        training.accumulate_gradients([*batch.micro_batches(0)], WHOLE)
        result = concat(results)
        return result.like(result.values.cpu())

    @on_all_ranks(Dispatch.RANK_ZERO)
    def optim_step(
        self, lr: float, betas: tuple[float, float], eps: float, decay: float, max_norm: float
    ) -> dict[str, float]:
        """Take an AdamW step with the gradients so far, and clear them; return metrics.

        `max_norm` 0: gradients are not clipped. A step whose gradients are not finite is skipped.
        """
        self.begin()
        optimizer = self.optimizer
        for group in optimizer.adamw.param_groups:
            group |= {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
        with optimizer.on_device():
            zero = torch.zeros((), device=self.device)
            step = optimizer.apply_gradients(zero, max_norm or math.inf)
        return {"grad_norm": float(step.norm), "skipped": float(step.skipped)}

    @on_all_ranks(Dispatch.BROADCAST)
    def hold(self, name: str, *, whole: bool) -> None:
        """Copy the trained weights to host memory; if `whole`, also moments and gradients."""
        with self.state_on_device():
            tensors = self._tensors().items()
            self.held[name] = {key: copied(x) for key, x in tensors if whole or is_weight(key)}

    @on_all_ranks(Dispatch.BROADCAST)
    def take(self, name: str, *, whole: bool) -> None:
        """Load what is held under a name; if `whole`, moments and gradients are as they were held.

        Those of weights that are held alone are none.
        """
        held = self.held[name]
        with self.state_on_device():
            if whole:
                self.expect_state({key for key in held if key.startswith(OPTIM)})
                for key, param in trained_parameters(self.model).items():
                    there = f"{GRADIENTS}{key}" in held
                    param.grad = torch.empty_like(param.detach()) if there else None
            for key, tensor in self._tensors().items():
                if key in held and (whole or is_weight(key)):
                    local_tensor(tensor).copy_(held[key])

    @on_all_ranks(Dispatch.BROADCAST)
    def drop(self, names: Sequence[str]) -> None:
        """Free what is held under some names."""
        for name in names:
            self.held.pop(name, None)

    @on_all_ranks(Dispatch.BROADCAST)
    def drop_gradients(self) -> None:
        """Clear the gradients."""
        self.optimizer.drop_gradients()

    @on_all_ranks(Dispatch.BROADCAST)
    def forget_optimizer(self) -> None:
        """Drop AdamW's moments and step counts, and the gradients."""
        self.optimizer.drop_gradients()
        self.optimizer.adamw.state.clear()

    def _tensors(self) -> dict[str, Tensor]:
        """Return weights, AdamW's state and gradients by key, as they are now."""
        gradients = {
            f"{GRADIENTS}{name}": param.grad
            for name, param in trained_parameters(self.model).items()
            if param.grad is not None
        }
        return self.training_state() | gradients


def is_weight(key: str) -> bool:
    """Return whether a key of a held set is that of a weight."""
    return key.startswith(WEIGHTS)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's part in host memory."""
    return local_tensor(tensor.detach()).to("cpu", copy=True)
