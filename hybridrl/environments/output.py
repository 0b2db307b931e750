"""Output of coroutines that share a process: the end of each one's is kept, for its failure."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

# End of an episode's output that is shown if it fails.
SHOWN_CHARS = 2000


class Output:
    """End of what an episode writes."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        """Add text; the last SHOWN_CHARS are kept."""
        self.text = (self.text + text)[-SHOWN_CHARS:]


class EpisodeOutput:
    """stdout and stderr of this process, by episode; what is written outside of one passes on."""

    def __init__(self) -> None:
        self._current: ContextVar[Output | None] = ContextVar("output", default=None)
        sys.stdout = _Stream(sys.stdout, self._current)
        sys.stderr = _Stream(sys.stderr, self._current)

    @contextmanager
    def of_episode(self) -> Iterator[None]:
        """Keep the output of the code in this block; an error gets a note with its end."""
        output = Output()
        before = self._current.set(output)
        try:
            yield
        except BaseException as error:
            if output.text.strip():
                error.add_note(f"output: {output.text.rstrip()}")
            raise
        finally:
            self._current.reset(before)


class _Stream(io.TextIOBase):
    """Text stream in place of `real`, which has the descriptor."""

    def __init__(self, real: TextIO, current: ContextVar[Output | None]) -> None:
        self._real, self._current = real, current

    def write(self, text: str) -> int:
        """Write text to the episode's output or the real stream."""
        if (output := self._current.get()) is None:
            return self._real.write(text)
        output.add(text)
        return len(text)

    def flush(self) -> None:
        """Flush the real stream."""
        self._real.flush()

    def writable(self) -> bool:
        """Return that text can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the real stream."""
        return self._real.fileno()
