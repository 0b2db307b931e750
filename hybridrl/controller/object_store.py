"""Ray's object store, as calls with batches use it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef

from hybridrl.data.shardable import Piece


class ObjectStore:
    """Stores each piece in Ray's object store once, for the lifetime of the piece.

    `guarded` is the context of each call into Ray, which without a raylet would end this process.
    """

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._guarded = guarded
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def reference(self, piece: Piece) -> ObjectRef:
        """Return the reference to a piece's content; WorkerError if Ray is lost or has no room."""
        if piece not in self._stored:
            with self._guarded():
                self._stored[piece] = ray.put(piece())
        return self._stored[piece]
