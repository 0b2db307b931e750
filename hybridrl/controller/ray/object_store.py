"""What has been sent to the workers already."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef

from hybridrl.data.shardable import Piece


class ObjectStore:
    """Puts each piece into Ray's object store once, and lets it go with the piece.

    Workers on the driver's node map what is stored; other nodes fetch it once.

    Args:
        guarded: for each call into Ray, which without a raylet would end this process.
    """

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self._guarded = guarded
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._stored)

    def reference(self, piece: Piece) -> ObjectRef:
        """Where workers find the piece's content.

        Raises:
            WorkerError: Ray is gone, or has no room for it in memory nor on its disk.
        """
        if piece not in self._stored:
            with self._guarded():
                self._stored[piece] = ray.put(piece())
        return self._stored[piece]
