"""Counts the bytes that code allocates, on fake tensors: models of any size, without their data."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of all storages made within, while they live.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at one time since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Do not count the storages of tensors made outside, should they come up."""
        self._alive |= {id(tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            weakref.finalize(storage, self._forget, key, size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size
