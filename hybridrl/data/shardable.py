"""Batches that are dealt to ranks: how they are cut, sent and put together again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, eq=False)
class Piece:
    """Something that reaches a rank once, however many calls need it; known by its identity.

    Attributes:
        make: makes its content, which is not kept here: a batch is in memory once.
    """

    make: Callable[[], Any]

    @property
    def content(self) -> Any:
        """The content, made anew."""
        return self.make()


class Shardable(ABC):
    """An argument that knows how to be cut into shards and how results are put together."""

    @abstractmethod
    def shard(self, num_shards: int) -> Sequence[Any]:
        """One part per shard."""

    @abstractmethod
    def join(self, results: Sequence[Any]) -> Any:
        """The parts' results, in the order of the whole."""

    def pieces(self, num_shards: int) -> Sequence[Sequence[Piece]]:
        """For each shard the pieces of its part; by default the part is one piece.

        A batch that goes into several calls returns the same pieces each time: those that were
        sent before are not sent again.
        """
        return [[Piece(partial(_itself, part))] for part in self.shard(num_shards)]

    @staticmethod
    def assemble(contents: Sequence[Any]) -> Any:
        """A part from the contents of its pieces; runs where the part is needed."""
        (part,) = contents
        return part


def _itself(content: Any) -> Any:
    return content
