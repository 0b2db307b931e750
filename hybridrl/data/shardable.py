"""Batches that are split over ranks: split, sent in pieces, results joined; without torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

# Returns the content of one message to a rank. The object store keys on the function's identity
# and sends the content once, however many calls need it. The content is made anew on each call, so
# that the driver keeps one copy of a batch.
Piece = Callable[[], Any]


class Shardable(ABC):
    """An argument of a call that is split into shards, and the inverse for the results."""

    @abstractmethod
    def pieces(self, num_shards: int) -> Sequence[Sequence[Piece]]:
        """Return for each shard the pieces of its part.

        A batch that goes into several calls returns the same pieces each time: those that were
        sent before are not sent again.
        """

    @abstractmethod
    def join(self, results: Sequence[Any]) -> Any:
        """Return the shards' results in the order of the whole."""

    @staticmethod
    def assemble(contents: Sequence[Any]) -> Any:
        """Return a part made of its pieces' contents; runs on the rank that needs the part."""
        (part,) = contents
        return part

    def shard(self, num_shards: int) -> list[Any]:
        """Return one part per shard."""
        return [self.assemble([piece() for piece in one]) for one in self.pieces(num_shards)]
