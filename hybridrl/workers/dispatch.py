"""Dispatch modes: distribution of a call's arguments to ranks, and collection of results."""

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """Dispatch mode of a method.

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
    """Return the dispatch mode of a method; overriding methods inherit it.

    Raises:
        AttributeError: no class in the hierarchy marks a method of this name.
    """
    for cls in worker_class.__mro__:
        function = vars(cls).get(method)
        if function is not None and "dispatch" in vars(function):
            return function.dispatch
    raise AttributeError(f"{worker_class.__name__}.{method} is not marked with @on_all_ranks")
