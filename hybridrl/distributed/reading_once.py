"""Roles of one process that begin from one checkpoint read it once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# What was read: weights by name, under the class of transformers and the folder they came by.
Read = dict[tuple[type, Path], dict[str, "Tensor"]]

_shared: ContextVar[Read | None] = ContextVar("shared", default=None)


@contextmanager
def reading_once(read: Read) -> Iterator[None]:
    """Let what loads checkpoints inside take what was read before, and add what it reads.

    Args:
        read: float32 on the host, 4 bytes per parameter, for as long as the caller keeps it or
            until another folder is read.
    """
    token = _shared.set(read)
    try:
        yield
    finally:
        _shared.reset(token)


def known_reads() -> Read:
    """What was read; a dict of nobody's where nothing is shared."""
    read = _shared.get()
    return {} if read is None else read
