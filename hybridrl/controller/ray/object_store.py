"""Object store: pieces of batches that the workers have already."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef

from hybridrl.data.shardable import Piece


class ObjectStore:
    """Stores each piece in Ray's object store once, for the lifetime of the piece.

    Workers on the driver's node map it; other nodes fetch it once.

    Args:
        guarded: context of each call into Ray, which without a raylet would end this process.
    """

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._guarded = guarded
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._stored)

    def reference(self, piece: Piece) -> ObjectRef:
        """Return the reference to the piece's content.

        Raises:
            WorkerError: Ray is lost, or has no room in memory and on disk.
        """
        if piece not in self._stored:
            with self._guarded():
                self._stored[piece] = ray.put(piece())
        return self._stored[piece]
