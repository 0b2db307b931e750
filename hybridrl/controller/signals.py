"""SIGINT and SIGTERM as one exception in the main thread."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asks the run to end. Ray's blocking calls let no other exception type through.

    Args:
        signum: the signal; 128 + signum is the customary exit code.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.signum).name}"


class SignalGuard:
    """While it is entered, SIGINT and SIGTERM raise `Interrupted`; then old handlers return.

    A plain KeyboardInterrupt (Ray forgets the subclass) leaves it as `Interrupted` too. To be
    entered in the main thread.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._received: int | None = None

    def __enter__(self) -> "SignalGuard":
        self._previous = {signum: signal.getsignal(signum) for signum in SIGNALS}
        for signum, previous in self._previous.items():
            if previous is not signal.SIG_IGN:  # a background job of a shell ignores Ctrl-C
                signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        raise Interrupted(signum)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            raise Interrupted(self._received or signal.SIGINT) from None


@contextmanager
def shielded() -> Iterator[None]:
    """Let signals wait until the block is done, and raise `Interrupted` only then.

    For starting Ray and for shutting down: bounded in time, and not to be left half done.
    """
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        logger.warning("%s: will be heeded in a moment", signal.Signals(signum).name)
        received.append(signum)

    heeded = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    previous = {signum: signal.signal(signum, note) for signum in heeded}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if received:
        raise Interrupted(received[0])
