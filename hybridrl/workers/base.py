"""Base class of all roles."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import RoleConfig


class Worker:
    """Role in one process. The controller calls methods marked `on_all_ranks`.

    To extend a role, subclass its worker and name the subclass in the config
    (`actor.worker=my_package.MyActor`). `config_class` may be a subclass with more keys.

    Args:
        config: an instance of `config_class`.
        mesh: the training mesh with axes dp_replicate and dp_shard, over all ranks.
    """

    config_class: ClassVar[type[RoleConfig]]

    def __init__(self, config: Any, mesh: DeviceMesh) -> None:
        self.config = config
        self.mesh = mesh

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Return the number of consecutive ranks that share one data shard; 1 by default."""
        return 1

    @classmethod
    def modules_ahead(cls, config: Any, device_type: str) -> Sequence[str]:
        """Return modules of the role that are slow to import; none by default.

        They are imported in a thread during the rendezvous. This method may set environment
        variables that they read.

        Args:
            config: an instance of `config_class`.
            device_type: "cuda" or "cpu".
        """
        return ()

    def connect(self, roles: dict[str, "Worker"]) -> None:
        """Receive all roles of the process by name, once built; does nothing by default."""

    def rest(self) -> None:
        """Offload to the host according to fsdp.offload; does nothing by default."""

    def training_state(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint must hold for an exact resume; empty by default.

        Checkpoints of any sharding are loaded in place. Plain tensors must be equal on all ranks.
        An override extends the result of `super`.

        Returns:
            Tensors and DTensors by key; their contents are valid inside `state_on_device`.
        """
        return {}

    @contextmanager
    def state_on_device(self) -> Iterator[None]:
        """Make the contents of `training_state` valid in the block; by default always valid."""
        yield

    def expect_state(self, keys: Collection[str]) -> None:
        """Allocate or drop optional entries of `training_state` to match a checkpoint's keys.

        Does nothing by default. Called inside `state_on_device`, before a load.
        """

    def close(self) -> None:
        """Free resources that outlive the process, such as shared memory; none by default."""
