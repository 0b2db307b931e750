"""How a call to a role reaches its ranks and how their answers come back."""

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """How a method's arguments are dealt to the ranks and what its caller gets.

    SHARD_DP: the first argument is a `Shardable` (data/shardable.py), cut into one part per shard
        of the role's data axis; other arguments go to all ranks. The caller gets the argument's
        `join` of the parts' results, in shard order (of a rollout engine's ranks, the first one's).
    SHARD_DP_REDUCED: dealt like SHARD_DP, but every rank returns the same reduced result
        (metrics); the caller gets rank 0's.
    BROADCAST: the same arguments to all ranks; the caller gets the list of results by rank.
    RANK_ZERO: the same arguments to all ranks; the caller gets rank 0's result.
    """

    SHARD_DP = "shard_dp"
    SHARD_DP_REDUCED = "shard_dp_reduced"
    BROADCAST = "broadcast"
    RANK_ZERO = "rank_zero"


def on_all_ranks(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Mark a worker method that the controller may call, on all ranks at the same time."""

    def mark(method: Method) -> Method:
        method.dispatch = dispatch  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, method: str) -> Dispatch:
    """How `method` of a worker class was marked; overriding methods inherit the mark.

    Raises:
        AttributeError: no class in the hierarchy marks a method of this name.
    """
    for cls in worker_class.__mro__:
        function = vars(cls).get(method)
        if function is not None and "dispatch" in vars(function):
            return function.dispatch
    raise AttributeError(f"{worker_class.__name__}.{method} is not marked with @on_all_ranks")
