"""Output of coroutines that share a process: the end of each one's is kept, for its failure."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO, TextIO

from hybridrl.rewards.processes.messages import OUTPUT

# End of an episode's output that is shown if it fails.
SHOWN_CHARS = 2000


class EpisodeOutput:
    """stdout and stderr of this process, by episode; what is written outside of one passes on."""

    def __init__(self) -> None:
        self._current: ContextVar[bytearray | None] = ContextVar("output", default=None)
        sys.stdout, sys.stderr = self._of(sys.stdout), self._of(sys.stderr)

    @contextmanager
    def of_episode(self) -> Iterator[None]:
        """Keep the output of the code in this block; an error gets a note with its end."""
        output = bytearray()
        before = self._current.set(output)
        try:
            yield
        except BaseException as error:
            if text := output.decode(errors="replace").strip():
                error.add_note(f"{OUTPUT}{text}")
            raise
        finally:
            self._current.reset(before)

    def _of(self, real: TextIO) -> TextIO:
        stream = _Stream(real.buffer, self._current)
        return io.TextIOWrapper(stream, "utf-8", "backslashreplace", write_through=True)


class _Stream(io.BufferedIOBase):
    """Binary stream in place of `real`, which has the descriptor."""

    def __init__(self, real: BinaryIO, current: ContextVar[bytearray | None]) -> None:
        self._real, self._current = real, current

    @property
    def name(self) -> str:
        """Name of the real stream."""
        return self._real.name

    def write(self, data: Any) -> int:
        """Add data to the episode's output, of which the end is kept, or to the real stream."""
        if (output := self._current.get()) is None:
            self._real.write(data)
            self._real.flush()
        else:
            output += data
            del output[:-SHOWN_CHARS]
        return len(data)

    def writable(self) -> bool:
        """Return that data can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the real stream."""
        return self._real.fileno()
