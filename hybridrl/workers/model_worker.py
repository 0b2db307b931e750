"""Base classes of roles with a sharded model: frozen (ModelWorker) or trained (TrainedWorker)."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.checkpoint.files import STATE
from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import RankBatch
from hybridrl.distributed import position
from hybridrl.distributed.forward.layers import shares_prefixes
from hybridrl.distributed.forward.packing import Packed, States, pack, to_device
from hybridrl.distributed.forward.sequence_parallel import sequence_group
from hybridrl.distributed.forward.vision import ImagePacker
from hybridrl.distributed.fsdp import gathered_once, parameters_in_checkpoint
from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.offload import Offloadable, offloadable_weights
from hybridrl.distributed.process_memory import use_expandable_segments
from hybridrl.distributed.regions import NamedShard, free_gathered_weights, named_shards
from hybridrl.distributed.storage.checkpoint import StoredState, differences
from hybridrl.workers.base import Worker
from hybridrl.workers.training import Loss, Optimizer, Training

# Prefixes of keys of the training state.
WEIGHTS, OPTIM = "weights.", "optim."


class ModelWorker(Worker):
    """Worker with a model, an FSDP2 root, on the rank's device."""

    model: nn.Module
    weights: Offloadable
    shares_prefixes: bool

    def __init__(self, config: Any, mesh: DeviceMesh) -> None:
        super().__init__(config, mesh)
        self.device = device_of(mesh)
        use_expandable_segments(self.device)
        self.sequence_group = sequence_group(config.fsdp.ulysses_size)

    def own(self, model: nn.Module) -> None:
        """Set the role's model, and make it offloadable."""
        self.model = model
        self.shares_prefixes = self.config.fsdp.share_prefixes and shares_prefixes(model)
        self.weights = offloadable_weights(model, self.config.fsdp.offload, self.device)

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Return the number of ranks that share each sequence."""
        return config.fsdp.ulysses_size

    def begin(self) -> None:
        """Load this role's weights onto the device and, under idle_all, offload other roles'.

        Weights stay until another role begins, so consecutive phases of one role move nothing.
        """
        self.others_rest()
        self.weights.wait()

    def rest(self) -> None:
        """Offload the weights to host memory under idle_all."""
        self.weights.offload()

    def named_shards(self) -> list[NamedShard]:
        """Return this rank's shards of the weights, for a reshard in the same process."""
        return named_shards(self.model)

    def pack(
        self,
        micro: RolloutBatch,
        states: States = States.predicting,
        routed_experts: Ragged | None = None,
    ) -> Packed:
        """Pack this rank's part of a micro-batch, on the device, with its experts if given."""
        images: ImagePacker | None = vars(self.model).get("images")
        return pack(
            micro,
            self.device,
            self.sequence_group,
            states,
            routed_experts,
            images,
            shares=self.shares_prefixes,
        )

    def on_device(self, values: Ragged) -> Tensor:
        """Copy the flat values of a field of the batch to the device."""
        return to_device(values.values, self.device)

    @torch.no_grad()
    def over_first_epoch(
        self, batch: RankBatch, compute: Callable[[RolloutBatch], Tensor]
    ) -> Ragged:
        """Map `compute` over the first epoch: one number per response token, on CPU.

        Rows are in the order of the micro-batches. Results stay on the device until the end.
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
    """Worker whose model is trained."""

    optimizer: Optimizer

    def own(self, model: nn.Module) -> None:
        """Set the role's model and its optimizer, and make both offloadable."""
        super().own(model)
        config = self.config
        self.optimizer = Optimizer(model, config.optim, config.total_steps, config.fsdp.offload)

    @contextmanager
    def training(self, loss: Loss, step: int) -> Iterator[Training]:
        """Within this context, take the optimizer steps of training step `step`."""
        self.begin()
        self.optimizer.set_step(step)
        with self.optimizer.on_device():
            yield Training(self.optimizer, loss, self.config.fsdp)

    def training_state(self) -> dict[str, Tensor]:
        """Return the trained weights, and AdamW's state of weights with a step.

        Keys are weights.<name>, optim.step.<name>, optim.exp_avg.<name>, optim.exp_avg_sq.<name>;
        names are those of `trained_parameters`. Moments are sharded as their weight.
        """
        parameters = trained_parameters(self.model)
        weights = {f"{WEIGHTS}{name}": param.detach() for name, param in parameters.items()}
        return weights | {
            f"{OPTIM}{kind}.{name}": tensor
            for name, param in parameters.items()
            for kind, tensor in self.optimizer.adamw.state.get(param, {}).items()
        }

    @contextmanager
    def state_on_device(self) -> Iterator[None]:
        """Keep weights and moments on the device during the block, despite fsdp.offload."""
        self.begin()
        with self.optimizer.on_device():
            self.optimizer.moments.wait()
            yield

    def expect_state(self, keys: Collection[str]) -> None:
        """Allocate AdamW's state for exactly the weights with a state in the checkpoint."""
        state = self.optimizer.adamw.state
        for name, param in trained_parameters(self.model).items():
            if f"{OPTIM}step.{name}" not in keys:
                state.pop(param, None)
            elif param not in state:
                state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param.detach()),
                    "exp_avg_sq": torch.zeros_like(param.detach()),
                }


def trained_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return this rank's shards of the trained parameters; tied ones once.

    Names are those of an HF checkpoint or, of adapters and the critic's head, of the model.
    """
    free_gathered_weights(root)
    in_checkpoint = {param: name for name, param in parameters_in_checkpoint(root)}
    return {
        in_checkpoint[param] if param in in_checkpoint else name.removeprefix("lm."): param
        for name, param in root.named_parameters()
        if param.requires_grad
    }


def load_trained_weights(worker: ModelWorker, checkpoint: Path, role: str) -> None:
    """Load a role's trained weights, which are on the device, from a checkpoint of any ranks.

    Raises:
        ConfigError: the checkpoint holds weights of another model.
    """
    stored, prefix = StoredState(checkpoint / STATE), f"{role}.{WEIGHTS}"
    state = {f"{prefix}{name}": p for name, p in trained_parameters(worker.model).items()}
    if differing := differences(state, stored.tensors, prefix):
        raise ConfigError(
            f"{checkpoint} holds other weights than model.path = {worker.config.model.path} has:\n"
            + "\n".join(differing)
            + "\nSet model.path to the model that was trained."
        )
    stored.load(state)
