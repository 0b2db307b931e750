"""What all roles have in common."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.config.schema import RoleConfig


class Worker:
    """One role's part in one process. The controller calls methods marked `on_all_ranks`.

    A role is extended by subclassing its worker and naming the subclass in config
    (`actor.worker=my_package.MyActor`); `config_class` may be a subclass with more keys.

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
        """Consecutive ranks that answer one data shard together; 1 unless a role says more."""
        return 1

    @classmethod
    def modules_ahead(cls, config: Any, device_type: str) -> Sequence[str]:
        """Modules that building the role needs and that take long to import; none by default.

        A process imports them in a thread while the ranks meet. Called before that, and may set
        what the modules read.

        Args:
            config: an instance of `config_class`.
            device_type: "cuda" or "cpu".
        """
        return ()

    def connect(self, roles: dict[str, "Worker"]) -> None:
        """See the process's other roles by name, once all are built; does nothing by default."""

    def rest(self) -> None:
        """Leave the device to another role, as far as fsdp.offload says; nothing by default."""

    def training_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of this role for training to go on as if never interrupted.

        Nothing by default. A checkpoint is loaded into these very tensors, under any sharding.
        Plain tensors must be the same on all ranks. An override adds to what `super` returns.

        Returns:
            Tensors and DTensors by key; their contents need only be there inside `state_at_hand`.
        """
        return {}

    @contextmanager
    def state_at_hand(self) -> Iterator[None]:
        """Inside, the contents of `training_state` are there; by default they always are."""
        yield

    def expect_state(self, keys: Collection[str]) -> None:
        """Make `training_state` have those of a checkpoint's keys that may or may not be there.

        Does nothing by default; called inside `state_at_hand`, before a checkpoint is loaded.
        """

    def close(self) -> None:
        """Free what would outlive the process, such as shared memory; nothing by default."""
