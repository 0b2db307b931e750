"""What actor, critic, reference and reward model share: a sharded model on the rank's device."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.checkpoint.names import STATE
from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed import position
from hybridrl.distributed.accumulation import gathered_once, reshard
from hybridrl.distributed.forward.packing import Packed, pack, to_device
from hybridrl.distributed.forward.sequence_parallel import sequence_group
from hybridrl.distributed.fsdp import parameters_in_checkpoint
from hybridrl.distributed.groups import NO_LIMIT
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.offload import Offloadable
from hybridrl.distributed.storage.checkpoint import StoredState, differences, load_in_place
from hybridrl.workers.base import Worker
from hybridrl.workers.optimizer import Optimizer

# Prefixes of keys of the training state.
WEIGHTS, OPTIM = "weights.", "optim."


class ModelWorker(Worker):
    """A worker with a model, an FSDP2 root, on the rank's device.

    Args:
        config: an instance of `config_class`.
        mesh: the training mesh.
    """

    model: nn.Module
    weights: Offloadable

    def __init__(self, config: Any, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.device = device_of(mesh)
        self.sequence_group = sequence_group(config.fsdp.ulysses_size)
        self.others: Iterable[Worker] = ()

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Ranks that share each sequence."""
        return config.fsdp.ulysses_size

    def connect(self, roles: dict[str, Worker]) -> None:
        """Know the roles to which this one takes turns on the device."""
        self.others = [role for role in roles.values() if role is not self]

    def begin(self) -> None:
        """Have this role's weights on the device, and the other roles' off it under idle_all.

        Weights stay until another role begins: between phases of one role nothing moves.
        """
        for other in self.others:
            other.rest()
        self.weights.wait()

    def rest(self) -> None:
        """Let the weights idle in host memory under idle_all."""
        self.weights.offload()

    def pack(self, micro: RolloutBatch) -> Packed:
        """What this rank computes of a micro-batch, on its device."""
        return pack(micro, self.device, self.sequence_group)

    def on_device(self, values: Ragged | None) -> Tensor:
        """The flat values of a field of the batch, which must be there, on the rank's device."""
        assert values is not None, "the phase that fills this field has not run"
        return to_device(values.values, self.device)

    @torch.no_grad()
    def over_first_epoch(
        self, batch: RankBatch, compute: Callable[[RolloutBatch], Tensor]
    ) -> Ragged:
        """`compute` on each micro-batch of the first epoch: one number per response token, on CPU.

        Rows stand in the order of the micro-batches. The results stay on the device until the
        end, so that it never waits between micro-batches.
        """
        self.begin()
        numbers, total = count(1), sum(len(mini) for mini in batch.epochs[0])

        def one(micro: RolloutBatch) -> Ragged:
            position.at("micro-batch", next(numbers), total)
            return micro.responses.like(compute(micro))

        with gathered_once(self.model, self.config.fsdp):
            result = batch.map_first_epoch(one)
        return result.like(result.values.cpu())


class TrainedWorker(ModelWorker):
    """A worker whose model is trained."""

    optimizer: Optimizer

    def training_state(self) -> dict[str, Tensor]:
        """The trained weights, and AdamW's state where it has taken a step.

        Returns:
            weights.<name>, the checkpoint's name where the weight has one; optim.step.<name>,
            optim.exp_avg.<name>, optim.exp_avg_sq.<name>. Moments are sharded as their weight is.
        """
        parameters = trained_parameters(self.model)
        weights = {f"{WEIGHTS}{name}": param.detach() for name, param in parameters.items()}
        moments = self.optimizer.state_of(parameters)
        return weights | {f"{OPTIM}{key}": tensor for key, tensor in moments.items()}

    @contextmanager
    def state_at_hand(self) -> Iterator[None]:
        """Inside, weights and moments are on the device, whatever fsdp.offload says."""
        self.begin()
        with self.optimizer.on_device():
            self.optimizer.moments.wait()
            yield

    def expect_state(self, keys: Collection[str]) -> None:
        """Give AdamW a state for exactly the weights of which a checkpoint has one."""
        self.optimizer.expect_state(
            {
                param: f"{OPTIM}step.{name}" in keys
                for name, param in trained_parameters(self.model).items()
            }
        )


def trained_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's shards of what is trained, as parameters of the root.

    Returns:
        Tied ones once, by their names in a checkpoint, or in the model if none has them: adapters,
        the critic's head.
    """
    reshard(root)
    in_checkpoint = {param: name for name, param in parameters_in_checkpoint(root)}
    return {
        in_checkpoint[param] if param in in_checkpoint else name.removeprefix("lm."): param
        for name, param in root.named_parameters()
        if param.requires_grad
    }


def load_trained_weights(worker: ModelWorker, checkpoint: Path, role: str) -> None:
    """Load trained weights from a checkpoint, written by any number of ranks; a collective.

    Args:
        worker: its weights are on the device.
        checkpoint: folder of the checkpoint.
        role: name of the worker's role in the checkpoint.

    Raises:
        ConfigError: the checkpoint holds weights of another model.
    """
    folder, prefix = checkpoint / STATE, f"{role}.{WEIGHTS}"
    state = {f"{prefix}{name}": p for name, p in trained_parameters(worker.model).items()}
    found = differences(state, StoredState(folder).tensors, prefix)
    if found:
        raise ConfigError(
            f"{checkpoint} holds other weights than model.path = {worker.config.model.path} has:\n"
            + "\n".join(found)
            + "\nSet model.path to the model that was trained."
        )
    load_in_place(state, folder, dist.new_group(backend="gloo", timeout=NO_LIMIT))
