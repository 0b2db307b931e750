"""Base class of all roles, and how a call of the controller reaches their methods.

The driver imports this file, without torch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hybridrl.config.schema import RoleConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """Distribution of a call's arguments to ranks, and collection of its results.

    SHARD_DP: the first argument is a `Shardable` (data/shardable.py), split into one part per
        shard of the role's data axis; other arguments go to all ranks. Returns the argument's
        `join` of the results in shard order, from the first rank of each shard.
    SHARD_DP_REDUCED: arguments as in SHARD_DP. Every rank computes the same reduced result
        (metrics); returns rank 0's.
    BROADCAST: the same arguments to all ranks; returns the list of results by rank.
    RANK_ZERO: the same arguments to all ranks; returns rank 0's result.
    """

    SHARD_DP = "shard_dp"
    SHARD_DP_REDUCED = "shard_dp_reduced"
    BROADCAST = "broadcast"
    RANK_ZERO = "rank_zero"


def on_all_ranks(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Mark a worker method that the controller calls on all ranks at the same time."""

    def mark(method: Method) -> Method:
        method.dispatch = dispatch  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, method: str) -> Dispatch:
    """Return the dispatch mode of a method; overriding methods inherit it."""
    for cls in worker_class.__mro__:
        function = vars(cls).get(method)
        if function is not None and "dispatch" in vars(function):
            return function.dispatch
    raise AttributeError(f"{worker_class.__name__}.{method} is not marked with @on_all_ranks")


class Worker:
    """Role in one process. The controller calls methods marked `on_all_ranks`.

    To extend a role, subclass its worker and name the subclass in the config
    (`actor.worker=my_package.MyActor`). `config_class` may be a subclass with more keys. `mesh` is
    the training mesh with axes dp_replicate and dp_shard, over all ranks.
    """

    config_class: ClassVar[type[RoleConfig]]

    def __init__(self, config: Any, mesh: "DeviceMesh") -> None:
        self.config = config
        self.mesh = mesh
        self.others: Sequence[Worker] = ()

    @classmethod
    def ranks_per_shard(cls, config: Any) -> int:
        """Return the number of consecutive ranks that share one data shard; 1 by default."""
        return 1

    @classmethod
    def modules_ahead(cls, config: Any, device_type: str) -> Sequence[str]:
        """Return modules that are slow to import, for a thread during the rendezvous.

        It may set environment variables that they read.
        """
        return ()

    def connect(self, roles: dict[str, "Worker"]) -> None:
        """Store the other roles of the process; called with all of them by name, once built."""
        self.others = [role for role in roles.values() if role is not self]

    def others_rest(self) -> None:
        """Offload the other roles according to fsdp.offload; no effect if already offloaded."""
        for role in self.others:
            role.rest()

    def rest(self) -> None:
        """Offload to the host according to fsdp.offload; does nothing by default."""

    def training_state(self) -> "dict[str, Tensor]":
        """Return the state that a checkpoint must hold for an exact resume; empty by default.

        Checkpoints of any sharding are loaded in place. Plain tensors must be equal on all ranks.
        Contents are valid inside `state_on_device`. An override extends the result of `super`.
        """
        return {}

    @contextmanager
    def state_on_device(self) -> Iterator[None]:
        """Make the contents of `training_state` valid in the block."""
        yield

    def expect_state(self, keys: Collection[str]) -> None:
        """Allocate or drop optional entries of `training_state` to match a checkpoint's keys.

        Called inside `state_on_device`, before a load.
        """

    def close(self) -> None:
        """Free resources that outlive the process, such as shared memory; none by default."""
