"""What has been sent to the workers already."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef

from hybridrl.data.shardable import Piece


class ObjectStore:
    """Puts each piece into Ray's object store once, and lets it go with the piece.

    Workers on the driver's node map what is stored; other nodes fetch it once.

    Args:
        check: raises if Ray is gone: it would end the process that puts something.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._stored: WeakKeyDictionary[Piece, ObjectRef] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._stored)

    def reference(self, piece: Piece) -> ObjectRef:
        """Where workers find the piece's content."""
        if piece not in self._stored:
            self._check()
            self._stored[piece] = ray.put(piece.content)
        return self._stored[piece]
