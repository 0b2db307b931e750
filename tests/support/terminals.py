"""Programs in a terminal of their own, which is closed while they run."""

import contextlib
import fcntl
import os
import pty
import termios
from collections.abc import Iterator
from typing import Any


class Terminal:
    """A pseudo-terminal; whoever is started with `options` is the leader of its session."""

    def __init__(self) -> None:
        self._master, self._slave = pty.openpty()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of Popen."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        return {**streams, "start_new_session": True, "preexec_fn": _control}

    def hang_up(self) -> None:
        """Close it, as a window or a lost connection does; any number of times."""
        for descriptor in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _control() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal for the time of the block."""
    made = Terminal()
    try:
        yield made
    finally:
        made.hang_up()
