"""What has been sent to the workers already."""

from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef

from hybridrl.data.shardable import Piece


class ObjectStore:
    """Puts each piece into Ray's object store once, and lets it go with the piece.

    Workers on the driver's node map what is stored; other nodes fetch it once.
    """

    def __init__(self) -> None:
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._stored)

    def reference(self, piece: Piece) -> ObjectRef:
        """Where workers find the piece's content."""
        if piece not in self._stored:
            self._stored[piece] = ray.put(piece.content)
        return self._stored[piece]
